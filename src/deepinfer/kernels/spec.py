"""Kernels of speculation: the verdict over drafts of ragged rows, and drafts from a request's own text.

Logits of the target are flat: the rows of request 0, then those of request 1, and so on; each has the row of its anchor
first, then one behind each verified draft. A request's outcome is a function of its own rows, drafts, seed and position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.host import is_readable
from deepinfer.kernels.reference import spec as reference
from deepinfer.kernels.registry import Operation

__all__ = ["ngram_propose", "speculative_verify"]

_INPUTS = "Tensor target, Tensor drafts, Tensor lengths, Tensor positions, Tensor seeds, Tensor? temperature"
COUPLED = Operation(
    "speculative_verify_coupled", f"{_INPUTS}, Tensor(x!) out, Tensor(y!) num_accepted"
)
STANDARD = Operation(
    "speculative_verify_standard",
    f"{_INPUTS}, Tensor? draft_logits, Tensor(x!) out, Tensor(y!) num_accepted",
)
NGRAM = Operation(
    "ngram_propose",
    "Tensor tokens, Tensor lengths, int min_n, int max_n, int window, Tensor(x!) out, Tensor(y!) matched",
)
OPERATIONS = (COUPLED, STANDARD, NGRAM)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int64, torch.int32)
_RULES = ("coupled", "standard")


def speculative_verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    positions: Tensor,
    seeds: Tensor,
    *,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    temperature: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Judges the drafts of every request, and draws the token behind the accepted ones.

    "coupled" draws every row as `gumbel_sample` would, and drafts stay as far as they are what was drawn: what comes out
    is what comes out without drafts, token by token. "standard" keeps draft x with probability min(1, p(x) / q(x)), and
    replaces the first refused one by a draw from the part of p above q; its numbers are the noise of tokens with purpose
    2 (test, of the draft), 3 (replacement) and 4 (behind the last draft), so they are independent of what drew drafts
    with purpose 1.

    Args:
        target_logits: Shape [rows, vocab], fp32, bf16 or fp16, rows may lie apart: sum of (lengths + 1) rows; more are
            padding.
        draft_tokens: Shape [requests, drafts], int64, last stride 1; a negative one ends its row.
        lengths: Drafts that are verified, shape [requests], int32 or int64, from 0 to `drafts`. Others are refused on a
            CPU; on a GPU, whose values are not looked at, they count as the nearer end, and rows that are not there as NaN.
        positions: Position of the first token behind each anchor, shape [requests], int32 or int64.
        seeds: 64 bits each, shape [requests], int64.
        rule: "coupled" or "standard".
        draft_logits: Logits that the drafts were drawn from, shape [requests, drafts, vocab], dtype of the target's, last
            stride 1; for the standard rule. None when they were chosen, not drawn.
        temperature: Of both laws, shape [requests], fp64 or fp32; 0 takes the highest logit. None for 1.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Emitted tokens, accepted drafts first, shape [requests, drafts + 1], int64, -1 behind the last; and the number of
        accepted drafts, shape [requests], int64. A target row with a highest logit that is not finite accepts nothing,
        and gives token -1: the caller should end the request; so does a NaN temperature under the standard rule (the coupled
        one takes the highest, as `gumbel_sample`). A draft that its law cannot have drawn (no share in q, a NaN in q, an id
        from `vocab` on) counts as chosen; what the target forbids is never emitted. Where nothing of p is above q the refused
        draft stands, because only rounding can have refused it.

    Raises:
        ShapeError: A shape, dtype or stride is not as above, there is no such rule, or, on a CPU, a length is out of range
            or there are fewer rows than lengths ask for.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("target_logits", target_logits, *_FLOATS)
    contract.check_shape("target_logits", target_logits, (None, None), "rows, vocab")
    contract.check_last_stride("target_logits", target_logits)
    contract.check_dtype("draft_tokens", draft_tokens, torch.int64)
    contract.check_shape("draft_tokens", draft_tokens, (None, None), "requests, drafts")
    contract.check_last_stride("draft_tokens", draft_tokens)
    requests, width = draft_tokens.shape
    vocab = target_logits.shape[1]
    for name, value, dtypes in (
        ("lengths", lengths, _INTS),
        ("positions", positions, _INTS),
        ("seeds", seeds, (torch.int64,)),
        ("temperature", temperature, (torch.float64, torch.float32)),
    ):
        if value is not None:
            contract.check_dtype(name, value, *dtypes)
            contract.check_shape(name, value, (requests,), "requests")
            contract.check_last_stride(name, value)
    if rule not in _RULES or (rule == "coupled" and draft_logits is not None):
        raise ShapeError(
            f"rule is {rule!r}{' with draft_logits' if draft_logits is not None else ''}; it must be 'coupled', or "
            "'standard', which alone looks at the law of the drafts.",
            argument="rule", expected=_RULES, found=rule,
        )  # fmt: skip
    if draft_logits is not None:
        contract.check_dtype("draft_logits", draft_logits, target_logits.dtype)
        contract.check_shape(
            "draft_logits", draft_logits, (requests, width, vocab), "requests, drafts, vocab"
        )
        contract.check_last_stride("draft_logits", draft_logits)
    if not vocab or target_logits.shape[0] < requests:
        raise ShapeError(
            f"target_logits has shape {tuple(target_logits.shape)}; {requests} requests need at least a row each, and a "
            "vocabulary.",
            argument="target_logits", expected=(requests, vocab), found=tuple(target_logits.shape),
        )  # fmt: skip
    _check_lengths(lengths, width)
    needed = requests
    if is_readable(lengths):
        needed += int(lengths.sum())
    if target_logits.shape[0] < needed:
        raise ShapeError(
            f"target_logits has {target_logits.shape[0]} rows; lengths ask for {needed}, one a draft and one a request.",
            argument="target_logits", expected=needed, found=target_logits.shape[0],
        )  # fmt: skip
    out = torch.empty((requests, width + 1), dtype=torch.int64, device=target_logits.device)
    accepted = torch.empty((requests,), dtype=torch.int64, device=target_logits.device)
    if requests:
        inputs = (target_logits, draft_tokens, lengths, positions, seeds, temperature)
        if rule == "coupled":
            COUPLED(backend, *inputs, out, accepted)
        else:
            STANDARD(backend, *inputs, draft_logits, out, accepted)
    return out, accepted


def ngram_propose(
    tokens: Tensor,
    lengths: Tensor,
    num_drafts: int,
    *,
    min_n: int = 2,
    max_n: int = 4,
    window: int = 8192,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Proposes what followed the last tokens of each text when they occurred in it before.

    The longest matched end wins, of equal ones the latest place. A match that overlaps the end repeats itself.

    Args:
        tokens: Texts so far, shape [rows, capacity], int64 or int32, last stride 1; any ids, they are only compared.
        lengths: Tokens of each text, shape [rows], int32 or int64, from 0 to the capacity. Others are refused on a CPU; on a
            GPU they count as the nearer end.
        num_drafts: Tokens to propose, from 1.
        min_n: Shortest end that counts, from 1.
        max_n: Longest end that counts, up to 64.
        window: How many of the last tokens are searched, up to 2^24.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Drafts, shape [rows, num_drafts], int64, -1 where nothing matches; length of the matched end, shape [rows], int32.

    Raises:
        ShapeError: A shape, dtype or stride is not as above, or a number (on a CPU a length) is out of range.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("tokens", tokens, *_INTS)
    contract.check_shape("tokens", tokens, (None, None), "rows, capacity")
    contract.check_last_stride("tokens", tokens)
    rows = tokens.shape[0]
    contract.check_dtype("lengths", lengths, *_INTS)
    contract.check_shape("lengths", lengths, (rows,), "rows")
    contract.check_last_stride("lengths", lengths)
    if not (num_drafts >= 1 and 1 <= min_n <= max_n <= 64 and 2 <= window <= 1 << 24):
        raise ShapeError(
            f"num_drafts is {num_drafts}, min_n {min_n}, max_n {max_n} and window {window}; num_drafts must be at least 1, "
            "1 <= min_n <= max_n <= 64, and the window in [2, 2^24].",
            argument="num_drafts", expected="at least 1", found=num_drafts,
        )  # fmt: skip
    _check_lengths(lengths, tokens.shape[1])
    out = torch.empty((rows, num_drafts), dtype=torch.int64, device=tokens.device)
    matched = torch.empty((rows,), dtype=torch.int32, device=tokens.device)
    if rows:
        NGRAM(backend, tokens, lengths, min_n, max_n, window, out, matched)
    return out, matched


def _check_lengths(lengths: Tensor, most: int) -> None:
    """Refuses lengths outside of [0, most], where they can be looked at."""
    if lengths.numel() and is_readable(lengths):
        low, high = (int(v) for v in lengths.aminmax())
        if low < 0 or high > most:
            raise ShapeError(
                f"lengths go from {low} to {high}; they must lie in [0, {most}].",
                argument="lengths", expected=f"[0, {most}]", found=(low, high),
            )  # fmt: skip


def _always(*args: object) -> None:
    """References serve every call."""


COUPLED.register("torch", supports=_always)(reference.verify_coupled)
STANDARD.register("torch", supports=_always)(reference.verify_standard)
NGRAM.register("torch", supports=_always)(reference.ngram_propose)


def _refusal(*args: object) -> str | None:
    return contract.triton_refusal(*(a for a in args if isinstance(a, Tensor)))


@COUPLED.register("triton", supports=_refusal, priority=10)
def _coupled(target: Tensor, *rest: object) -> None:
    from deepinfer.kernels.triton import spec_launch as launch

    with launch.on_device(target):
        launch.verify_coupled(target, *rest)  # type: ignore[arg-type]


@STANDARD.register("triton", supports=_refusal, priority=10)
def _standard(target: Tensor, *rest: object) -> None:
    from deepinfer.kernels.triton import spec_launch as launch

    with launch.on_device(target):
        launch.verify_standard(target, *rest)  # type: ignore[arg-type]


@NGRAM.register("triton", supports=_refusal, priority=10)
def _ngram(tokens: Tensor, *rest: object) -> None:
    from deepinfer.kernels.triton import spec_launch as launch

    with launch.on_device(tokens):
        launch.ngram(tokens, *rest)  # type: ignore[arg-type]
