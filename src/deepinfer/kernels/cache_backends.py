"""The operations of paged caches and what serves them: plain torch, and Triton."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference import cache as reference
from deepinfer.kernels.registry import Operation

__all__ = ["COMPRESS", "GATHER", "INSERT", "OPERATIONS", "ROPE"]

INSERT = Operation(
    "quantize_and_insert_k_cache",
    "Tensor k, Tensor(x!) cache, Tensor slots, str format, int page_size",
)
GATHER = Operation(
    "gather_and_dequantize_k_cache",
    "Tensor cache, Tensor slots, Tensor(x!) out, str format, int page_size",
)
ROPE = Operation(
    "rope_quant_insert",
    "Tensor k, Tensor phases, Tensor(x!) cache, Tensor slots, str format, int page_size, Tensor? weight, float eps, "
    "Tensor? phase_index, Tensor? positions, Tensor? floors",
)
COMPRESS = Operation(
    "compress_norm",
    "Tensor values, Tensor? gates, Tensor weight, float eps, Tensor phases, Tensor(x!) cache, Tensor slots, "
    "str format, int page_size, Tensor? last, Tensor(y!)? state, Tensor? requests, Tensor? positions, "
    "Tensor? phase_index, Tensor? floors, Tensor(z!) latents",
)
OPERATIONS = (INSERT, GATHER, ROPE, COMPRESS)


def _always(*args: object) -> None:
    """The references serve every call."""


@INSERT.register("torch", supports=_always)
def _insert_torch(k, cache, slots, format, page_size):
    reference.insert_rows(k, cache, slots, KVCacheFormat[format], page_size)


@GATHER.register("torch", supports=_always)
def _gather_torch(cache, slots, out, format, page_size):
    reference.gather_rows(cache, slots, out, KVCacheFormat[format], page_size)


@ROPE.register("torch", supports=_always)
def _rope_torch(
    k, phases, cache, slots, format, page_size, weight, eps, phase_index, positions, floors
):
    rows = reference.rotated(k, phases, phase_index, weight, eps)
    if floors is not None:
        slots = slots.masked_fill(positions < floors, -1)
    reference.insert_rows(rows, cache, slots, KVCacheFormat[format], page_size)


@COMPRESS.register("torch", supports=_always)
def _compress_torch(
    values, gates, weight, eps, phases, cache, slots, format, page_size, last, state, requests, positions,
    phase_index, floors, latents,
):  # fmt: skip
    row, at = reference.known_tokens(
        values, last, requests, positions, None if gates is None else state
    )
    if gates is None:
        rows = values[at]
    else:
        rows = reference.pool_pairs(values, gates, at, requests, positions, state)
        reference.keep_state(values, gates, requests, positions, state)
    rows = reference.rotated(rows.to(latents.dtype), None, None, weight, eps)
    latents.zero_()
    latents[row] = rows
    slots = slots[row]
    if floors is not None:
        slots = slots.masked_fill(positions[at] < floors[at], -1)
    entries = row if phase_index is None else phase_index[row]
    rows = reference.rotated(rows, phases, entries, None, eps)
    reference.insert_rows(rows, cache, slots, KVCacheFormat[format], page_size)


def _aligned_refusal(cache: Tensor, form: KVCacheFormat, page_size: int) -> str | None:
    if form.tail_channels or form.scale_type == "fp32":
        odd = cache.data_ptr() | cache.stride(0) | form.scales_offset(page_size)
        if odd % 4:
            return "pages or scales do not begin at multiples of 4 bytes"
    return None


def _insert_refusal(k, cache, slots, format, page_size):
    return contract.triton_refusal(k, cache, slots) or _aligned_refusal(
        cache, KVCacheFormat[format], page_size
    )


def _gather_refusal(cache, slots, out, format, page_size):
    return contract.triton_refusal(out, cache, slots) or _aligned_refusal(
        cache, KVCacheFormat[format], page_size
    )


def _rope_refusal(
    k, phases, cache, slots, format, page_size, weight, eps, phase_index, positions, floors
):
    found = (x for x in (weight, phase_index, positions, floors) if x is not None)
    return contract.triton_refusal(k, phases, cache, slots, *found) or _aligned_refusal(
        cache, KVCacheFormat[format], page_size
    )


def _compress_refusal(
    values, gates, weight, eps, phases, cache, slots, format, page_size, last, state, requests, positions,
    phase_index, floors, latents,
):  # fmt: skip
    maybe = (gates, last, state, requests, positions, phase_index, floors)
    found = (x for x in maybe if x is not None)
    return contract.triton_refusal(
        values, weight, phases, cache, slots, latents, *found
    ) or _aligned_refusal(cache, KVCacheFormat[format], page_size)


@INSERT.register("triton", supports=_insert_refusal, priority=10)
def _insert_triton(k, cache, slots, format, page_size):
    import deepinfer.kernels.triton.cache_launch as launch

    form = KVCacheFormat[format]
    launch.insert_rows(k, cache, slots.contiguous(), form, page_size, None, kind=k.dtype)


@GATHER.register("triton", supports=_gather_refusal, priority=10)
def _gather_triton(cache, slots, out, format, page_size):
    import deepinfer.kernels.triton.cache_launch as launch

    form = KVCacheFormat[format]
    launch.gather_rows(cache, slots.contiguous(), out, form, page_size, None)


@ROPE.register("triton", supports=_rope_refusal, priority=10)
def _rope_triton(
    k, phases, cache, slots, format, page_size, weight, eps, phase_index, positions, floors
):
    import deepinfer.kernels.triton.cache_launch as launch

    form = KVCacheFormat[format]
    launch.insert_rows(
        k, cache, slots.contiguous(), form, page_size, None, kind=k.dtype, weight=_flat(weight), eps=eps,
        phases=phases, phase_index=_flat(phase_index), positions=_flat(positions), floors=_flat(floors),
    )  # fmt: skip


@COMPRESS.register("triton", supports=_compress_refusal, priority=10)
def _compress_triton(
    values, gates, weight, eps, phases, cache, slots, format, page_size, last, state, requests, positions,
    phase_index, floors, latents,
):  # fmt: skip
    import deepinfer.kernels.triton.cache_launch as launch

    form = KVCacheFormat[format]
    requests, positions = _flat(requests), _flat(positions)
    if len(slots):
        launch.insert_rows(
            values, cache, slots.contiguous(), form, page_size, None, kind=latents.dtype, gates=gates,
            state=state, requests=requests, last=_flat(last), weight=_flat(weight), eps=eps, phases=phases,
            phase_index=_flat(phase_index), positions=positions, floors=_flat(floors), latents=latents, early=True,
        )  # fmt: skip
    if gates is not None:
        launch.keep_state(values, gates, requests, positions, state, early=len(slots) > 0)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
