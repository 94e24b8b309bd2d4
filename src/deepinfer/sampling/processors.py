"""Logits processors: user code that changes logits before a token is chosen.

A processor is called as `processor(logits, rows)`, changes `logits` (shape [rows, vocab], fp32) in place and
returns nothing. It must treat each row by that row alone, or outputs depend on the batch. It sees in
`rows.output_token_ids` every token before the one being chosen, drafts included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import LogitsProcessor as LogitsProcessor
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import Request
from deepinfer.sampling.penalties import apply_allowed_ids

__all__ = ["AllowTokens", "ForbidTokens", "LogitsProcessor", "PerRequest", "apply_processors"]


class AllowTokens:
    """Lets every row choose among some tokens only.

    Args:
        token_ids: Allowed tokens; ids past the vocabulary are ignored.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)

    def __call__(self, logits: Tensor, rows: SampleRows) -> None:
        """Sets all other logits to -inf.

        Args:
            logits: Shape [rows, vocab], fp32, changed in place.
            rows: Not looked at.
        """
        apply_allowed_ids(logits, self.token_ids)


class ForbidTokens:
    """Never lets a row choose some tokens, such as ids that may only appear in prompts.

    Args:
        token_ids: Forbidden tokens; ids past the vocabulary are ignored.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)

    def __call__(self, logits: Tensor, rows: SampleRows) -> None:
        """Sets the logits of these tokens to -inf.

        Args:
            logits: Shape [rows, vocab], fp32, changed in place.
            rows: Not looked at.
        """
        ids = [token for token in self.token_ids if 0 <= token < logits.shape[-1]]
        logits[:, torch.tensor(ids, dtype=torch.int64, device=logits.device)] = -math.inf


class PerRequest:
    """Applies a function to each row of some requests.

    Args:
        function: Called as `function(logits_row, request, output_token_ids)`; changes the row, shape [vocab],
            fp32, in place.
        rids: Ids of the requests it concerns, or None for all.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Request, Sequence[int]], None],
        rids: Sequence[str] | None = None,
    ) -> None:
        self.function = function
        self.rids = None if rids is None else frozenset(rids)

    def __call__(self, logits: Tensor, rows: SampleRows) -> None:
        """Calls the function once for each row concerned.

        Args:
            logits: Shape [rows, vocab], fp32, changed in place.
            rows: The rows' requests and outputs so far.
        """
        for index, request in enumerate(rows.requests):
            if self.rids is None or request.rid in self.rids:
                output = rows.output_token_ids[index] if rows.output_token_ids else ()
                self.function(logits[index], request, output)


def apply_processors(
    logits: Tensor, rows: SampleRows, processors: Sequence[LogitsProcessor]
) -> None:
    """Runs processors in order.

    Args:
        logits: Shape [rows, vocab], fp32, changed in place.
        rows: The rows' requests, positions and outputs so far.
        processors: What to run.

    Raises:
        ConfigError: A processor returns something, as if it had made new logits instead of changing these.
    """
    for processor in processors:
        result = processor(logits, rows)  # type: ignore[func-returns-value]
        if result is not None:
            raise ConfigError(
                f"logits processor {processor!r} returned {type(result).__name__}; it must change the logits in place "
                "and return None.",
                field="processors",
                value=processor,
            )
