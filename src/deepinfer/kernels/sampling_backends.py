"""Operations over rows of logits, and what serves them."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.reference import sampling as reference
from deepinfer.kernels.registry import Operation

__all__ = [
    "ARGMAX",
    "BITMASK",
    "GUMBEL",
    "LOG_PROBS",
    "MASK",
    "OPERATIONS",
    "PENALTIES",
    "SAMPLE",
]

ARGMAX = Operation("argmax_sample", "Tensor logits, Tensor(x!) out")
GUMBEL = Operation(
    "gumbel_sample",
    "Tensor logits, Tensor? temperature, Tensor seeds, Tensor positions, int stream, Tensor(x!) out",
)
_FILTERS = "Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p"
MASK = Operation("top_k_top_p_mask", f"{_FILTERS}, int widest, Tensor(x!) out")
SAMPLE = Operation(
    "top_k_top_p_sample",
    f"{_FILTERS}, Tensor seeds, Tensor positions, int stream, int widest, Tensor(x!) out",
)
BITMASK = Operation(
    "apply_token_bitmask", "Tensor(x!) logits, Tensor bitmask, Tensor? rows, int width"
)
PENALTIES = Operation(
    "apply_penalties",
    "Tensor(x!) logits, Tensor output_ids, Tensor? prompt_ids, Tensor presence, Tensor frequency, Tensor repetition",
)
LOG_PROBS = Operation(
    "log_probs",
    "Tensor logits, Tensor tokens, Tensor? found_ids, Tensor(x!) logprobs, Tensor(y!) ranks, Tensor(z!) best_ids, "
    "Tensor(w!) best_logprobs",
)
OPERATIONS = (ARGMAX, GUMBEL, MASK, SAMPLE, BITMASK, PENALTIES, LOG_PROBS)


def _always(*args: object) -> None:
    """References serve every call."""


ARGMAX.register("torch", supports=_always)(reference.argmax_sample)
GUMBEL.register("torch", supports=_always)(reference.gumbel_sample)
MASK.register("torch", supports=_always)(reference.top_k_top_p_mask)
SAMPLE.register("torch", supports=_always)(reference.top_k_top_p_sample)
BITMASK.register("torch", supports=_always)(reference.apply_token_bitmask)
PENALTIES.register("torch", supports=_always)(reference.apply_penalties)
LOG_PROBS.register("torch", supports=_always)(reference.log_probs)


def _refusal(*args: object) -> str | None:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if any(t.dim() == 1 and t.numel() > 1 and t.stride(0) != 1 for t in tensors):
        return "the options of the rows do not lie side by side"
    return contract.triton_refusal(*tensors)


@ARGMAX.register("triton", supports=_refusal, priority=10)
def _argmax(logits: Tensor, out: Tensor) -> None:
    from deepinfer.kernels.triton import sampling_launch as launch

    with launch.on_device(logits):
        launch.highest_tokens(logits, out)


@GUMBEL.register("triton", supports=_refusal, priority=10)
def _gumbel(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
) -> None:
    from deepinfer.kernels.triton import sampling_launch as launch

    with launch.on_device(logits):
        launch.best_tokens(logits, out, seeds, positions, temperature=temperature, stream=stream)


@MASK.register("triton", supports=_refusal, priority=10)
def _mask(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    widest: int,
    out: Tensor,
) -> None:
    from deepinfer.kernels.triton import sampling_launch as launch

    filters = launch.Filters(temperature, top_k, top_p, min_p, widest)
    with launch.on_device(logits):
        launch.mask_filtered(logits, filters, out)


@SAMPLE.register("triton", supports=_refusal, priority=10)
def _sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    widest: int,
    out: Tensor,
) -> None:
    from deepinfer.kernels.triton import sampling_launch as launch

    filters = launch.Filters(temperature, top_k, top_p, min_p, widest)
    with launch.on_device(logits):
        launch.draw_filtered(logits, filters, launch.Draw(seeds, positions, stream, out))


@BITMASK.register("triton", supports=_refusal, priority=10)
def _bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None, width: int) -> None:
    from deepinfer.kernels.triton import edit_launch as launch

    with launch.on_device(logits):
        launch.token_bitmask(logits, bitmask, rows, width)


@PENALTIES.register("triton", supports=_refusal, priority=10)
def _penalties(
    logits: Tensor,
    output_ids: Tensor,
    prompt_ids: Tensor | None,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    from deepinfer.kernels.triton import edit_launch as launch

    with launch.on_device(logits):
        launch.penalties(logits, output_ids, prompt_ids, presence, frequency, repetition)


@LOG_PROBS.register("triton", supports=_refusal, priority=10)
def _log_probs(
    logits: Tensor,
    tokens: Tensor,
    found_ids: Tensor | None,
    logprobs: Tensor,
    ranks: Tensor,
    best_ids: Tensor,
    best_logprobs: Tensor,
) -> None:
    from deepinfer.kernels.triton import edit_launch as launch

    with launch.on_device(logits):
        launch.log_probs(logits, tokens, found_ids, logprobs, ranks, best_ids, best_logprobs)
