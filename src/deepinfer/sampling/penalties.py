"""Changes to logits that come from a request's own options: penalties, bias, allowed tokens, grammar masks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepinfer.core.errors import InvalidRequest, ShapeError

__all__ = [
    "apply_allowed_ids",
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "unique_ids",
]


def unique_ids(token_ids: Sequence[int], vocab_size: int, device: torch.device | str) -> Tensor:
    """The different token ids of a sequence, ascending, without those past the vocabulary.

    Args:
        token_ids: Any token ids.
        vocab_size: Ids from here on have no logit and are left out.
        device: Where to put the result.

    Returns:
        Shape [unique], int64.
    """
    ids = sorted({token for token in token_ids if 0 <= token < vocab_size})
    return torch.tensor(ids, dtype=torch.int64, device=device)


def apply_penalties(
    logits: Tensor,
    output_token_ids: Sequence[int],
    *,
    prompt_ids: Tensor | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> None:
    """Applies repetition, frequency and presence penalties to one row, in this order, in place.

    The repetition penalty divides positive and multiplies negative logits of tokens seen in the prompt or the
    output; the other two look at the output only.

    Args:
        logits: Shape [vocab], fp32.
        output_token_ids: Tokens generated so far.
        prompt_ids: Different tokens of the prompt, shape [unique], int64, or None.
        presence_penalty: Subtracted once from each token of the output.
        frequency_penalty: Subtracted for each occurrence in the output.
        repetition_penalty: Above 0; 1 is off.
    """
    vocab = logits.shape[-1]
    counts = Counter(output_token_ids)
    if counts and (max(counts) >= vocab or min(counts) < 0):
        counts = Counter({token: n for token, n in counts.items() if 0 <= token < vocab})
    ids = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
    if repetition_penalty != 1.0:
        seen = ids if prompt_ids is None else torch.unique(torch.cat([ids, prompt_ids]))
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / repetition_penalty, values * repetition_penalty
        )
    if counts and (frequency_penalty or presence_penalty):
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
        logits[ids] -= times * frequency_penalty + presence_penalty


def apply_logit_bias(logits: Tensor, logit_bias: Mapping[int, float]) -> None:
    """Adds numbers to the logits of some tokens of one row, in place.

    Args:
        logits: Shape [vocab], fp32.
        logit_bias: Token id to number.

    Raises:
        InvalidRequest: A token id is past the vocabulary.
    """
    if not logit_bias:
        return
    highest = max(logit_bias)
    if highest >= logits.shape[-1] or min(logit_bias) < 0:
        raise InvalidRequest(
            f"logit_bias names token id {highest}; the model's ids go from 0 to {logits.shape[-1] - 1}. "
            "Use ids of this model's tokenizer.",
            field="logit_bias",
            value=highest,
            limit=f"below {logits.shape[-1]}",
        )
    ids = torch.tensor(list(logit_bias), dtype=torch.int64, device=logits.device)
    logits[ids] += torch.tensor(
        list(logit_bias.values()), dtype=torch.float32, device=logits.device
    )


def apply_allowed_ids(logits: Tensor, token_ids: Sequence[int] | Tensor) -> None:
    """Sets the logits of all other tokens to -inf, in place.

    Args:
        logits: Shape [vocab] or [rows, vocab], fp32.
        token_ids: Allowed tokens, shape [allowed]; ids past the vocabulary are ignored.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    forbidden[ids[(ids >= 0) & (ids < logits.shape[-1])]] = False
    logits.masked_fill_(forbidden, -math.inf)


def apply_token_bitmask(logits: Tensor, mask: Tensor) -> None:
    """Sets the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: Shape [rows, vocab], fp32.
        mask: Shape [rows, ceil(vocab / 32)], int32; token id `t` is bit (t & 31) of word (t >> 5).

    Raises:
        ShapeError: The mask has another dtype or another number of rows or words.
    """
    rows, vocab = logits.shape
    expected = (rows, (vocab + 31) // 32)
    if mask.dtype != torch.int32 or tuple(mask.shape) != expected:
        raise ShapeError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; logits of shape [{rows}, {vocab}] need int32 of "
            f"shape {list(expected)}, one bit a token.",
            argument="mask",
            expected=expected,
            found=tuple(mask.shape),
        )
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (mask.to(logits.device).unsqueeze(-1) >> shifts) & 1
    logits.masked_fill_(bits.flatten(1)[:, :vocab] == 0, -math.inf)
