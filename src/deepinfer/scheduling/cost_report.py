"""Coefficients of a step's duration, and what a fit says about them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["BucketError", "FitRejection", "FitReport", "StepCoefficients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients:
    """Seconds that each part of a step costs; the letters are those of the formula in `StepTimeModel`.

    Attributes:
        step_s: c, once a step.
        prefix_token_s: g, per token before a chunk: gathering what it reads.
        token_s: b, per token of a chunk, and per draft.
        pair_s: a, per unit of 2 L x + x².
        ended_prompt_s: d, per chunk that ends its prompt.
        decode_row_s: e, per decoding row.
        decode_context_token_s: f, per token before a decoding row.
        ended_prefix_token_s: h, per token before a chunk that ends its prompt: its last window selects from all of
            them once more, in layers that other prompt tokens do not run.
        mixed_step_s: m, once a step that has both chunks and decoding rows.
    """

    step_s: float = 0.0
    prefix_token_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    ended_prompt_s: float = 0.0
    decode_row_s: float = 0.0
    decode_context_token_s: float = 0.0
    ended_prefix_token_s: float = 0.0
    mixed_step_s: float = 0.0


class FitRejection(enum.StrEnum):
    """Why a fit is not used."""

    TOO_FEW_SAMPLES = "too_few_samples"
    """Fewer samples than coefficients, or than were asked for."""
    TOO_MANY_OUTLIERS = "too_many_outliers"
    """The formula passes by too large a share of the samples."""
    LARGE_RESIDUAL = "large_residual"
    """The samples that are no outliers scatter too far around it."""
    NO_COST_PER_TOKEN = "no_cost_per_token"
    """Chunks were timed, and more tokens would cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketError:
    """How far predictions are off for steps of one bucket, outliers left out.

    Attributes:
        bucket: Prefixes in it, in words.
        num_samples: Samples in it.
        mean_error: Mean of |predicted - measured| / measured.
        mean_bias: Mean of (predicted - measured) / measured; positive when predictions are too high.
    """

    bucket: str
    num_samples: int
    mean_error: float
    mean_bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What came of a fit.

    Attributes:
        coefficients: What was fitted, used or not; None when there were too few samples.
        rejection: Why it is not used, or None when it is.
        num_samples: Samples given.
        num_outliers: How many of them were left out.
        residual_share: Root mean square residual of the others as a share of their mean duration.
        buckets: Errors by length of prefix.
        undetermined: Names of coefficients about which the samples say nothing.
    """

    coefficients: StepCoefficients | None
    rejection: FitRejection | None
    num_samples: int
    num_outliers: int = 0
    residual_share: float = 0.0
    buckets: tuple[BucketError, ...] = ()
    undetermined: tuple[str, ...] = ()

    @property
    def is_accepted(self) -> bool:
        """Whether the fit is used."""
        return self.rejection is None
