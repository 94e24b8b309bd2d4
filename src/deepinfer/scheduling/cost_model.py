"""How long a step takes, and the largest chunk that fits a time."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.scheduling.cost_report import FitReport, StepCoefficients
from deepinfer.scheduling.step_work import Chunk, StepSample, StepWork, bucket_of

__all__ = ["PrefillCostModel", "StepTimeModel"]

_FORMAT = "deepinfer-step-cost-1"
_Chunks = Iterable[Chunk | tuple[int, int]]


class PrefillCostModel(Protocol):
    """Predicts the duration of steps; what a planner of chunks asks."""

    @property
    def is_fitted(self) -> bool:
        """Whether it knows anything yet."""
        ...

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step."""
        ...

    def largest_beside(self, work: StepWork, prefix: int, seconds: float, cap: int) -> int:
        """Most tokens, up to `cap`, of a chunk behind `prefix` with which the step takes `seconds` at most."""
        ...

    def observe_work(self, work: StepWork, seconds: float) -> None:
        """Learns from a step that was timed."""
        ...


class StepTimeModel:
    """The duration of a step as a sum over its rows.

    ```text
    t = c + sum over chunks of [g L + b x + a (2 L x + x²) + (d + h L if it ends its prompt)]
          + sum over decoding rows of [e + f n] + m if there are chunks and decoding rows
    ```

    A chunk has x tokens behind a prefix of L, and a decoding row n tokens before it. The prefix has a term of its own:
    a fit on prompts without prefixes cannot see what reading a long one costs, and gives chunks that are twice too
    large at a million tokens.

    `predict` and `largest` are plain arithmetic. Fitting needs NumPy.

    Args:
        coefficients: Seconds that each part costs, all from 0.
        fingerprint: What they hold for: the model, the device, the way it runs.
        version: Number of the fit, from 0.
        window: Samples kept for refits, for each bucket of prefixes, so that a day of short prompts does not make
            long ones forgotten.
        refit_every: Observed steps between refits; 0 never refits by itself.
        max_residual_share: Refits that scatter more are not used.

    Attributes:
        report: What came of the last fit, or None before one.

    Raises:
        ConfigError: A coefficient is negative or no number, or another number is out of range.

    Examples:
        >>> model = StepTimeModel(StepCoefficients(step_s=3e-3, token_s=1e-6, prefix_token_s=1e-8))
        >>> model.largest(prefix=0, seconds=0.0130005, cap=32_768)
        10000
        >>> model.largest(prefix=500_000, seconds=0.0130005, cap=32_768)
        5000
    """

    def __init__(
        self,
        coefficients: StepCoefficients,
        *,
        fingerprint: str = "",
        version: int = 0,
        window: int = 256,
        refit_every: int = 64,
        max_residual_share: float = 0.1,
    ) -> None:
        for name, value in asdict(coefficients).items():
            checks.check_float(name, value, 0.0, 1e9, ConfigError)
        self.coefficients = coefficients
        self._is_fitted = any(asdict(coefficients).values())
        self.fingerprint = fingerprint
        self.version = checks.check_int("version", version, 0, 2**31 - 1, ConfigError)
        self.window = checks.check_int("window", window, 1, 1_000_000, ConfigError)
        self.refit_every = checks.check_int("refit_every", refit_every, 0, 2**31 - 1, ConfigError)
        self.max_residual_share = checks.check_float(
            "max_residual_share", max_residual_share, 0.0, 10.0, ConfigError, open_low=True
        )
        self.report: FitReport | None = None
        self._samples: dict[int, deque[StepSample]] = {}
        self._num_new = 0

    @classmethod
    def fit(cls, samples: Sequence[StepSample], **options: Any) -> StepTimeModel:
        """A model fitted to timed steps.

        Args:
            samples: The steps; see `fit_step_cost` for what must be among them.
            options: Options of the constructor.

        Returns:
            The model, with its report.

        Raises:
            ConfigError: The fit was rejected; the message says why and the error's `value` is the report.
        """
        model = cls(StepCoefficients(), **options)
        report = model.refit(samples)
        if not report.is_accepted:
            raise ConfigError(
                f"the fit to {report.num_samples} samples was rejected ({report.rejection}): "
                f"{report.num_outliers} outliers, residual {report.residual_share:.1%} of the mean. "
                "Time more steps of more sizes, after a warm-up.",
                field="samples",
                value=report,
                limit=f"a residual of at most {model.max_residual_share:.1%} of the mean",
            )
        return model

    @property
    def is_fitted(self) -> bool:
        """Whether any coefficient is above 0."""
        return self._is_fitted

    @property
    def num_samples(self) -> int:
        """Samples kept for the next refit."""
        return sum(map(len, self._samples.values()))

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step that was added up.

        Args:
            work: The sums.

        Returns:
            The prediction; it never falls when a count rises.
        """
        k = self.coefficients
        return (
            k.step_s
            + k.prefix_token_s * work.prefix_tokens
            + k.token_s * work.tokens
            + k.pair_s * work.pairs
            + k.ended_prompt_s * work.ended_prompts
            + k.decode_row_s * work.decode_rows
            + k.decode_context_token_s * work.decode_context
            + k.ended_prefix_token_s * work.ended_prefix_tokens
            + k.mixed_step_s * work.is_mixed
        )

    def predict(self, chunks: _Chunks, decode: Sequence[int] = (), *, num_drafts: int = 0) -> float:
        """Seconds of a step.

        Args:
            chunks: Its chunks, as `Chunk` or as pairs of prefix and tokens.
            decode: Tokens before each decoding row, one entry a row.
            num_drafts: Drafts that these rows verify, together.

        Returns:
            The prediction.
        """
        return self.seconds(StepWork.of(chunks, decode, num_drafts))

    def largest(
        self,
        prefix: int,
        seconds: float,
        cap: int,
        others: _Chunks = (),
        decode: Sequence[int] = (),
        *,
        num_drafts: int = 0,
    ) -> int:
        """The largest chunk with which a step stays within a time.

        Args:
            prefix: Tokens before the chunk.
            seconds: Time of the whole step.
            cap: Most tokens.
            others: Chunks of the step beside this one.
            decode: Tokens before each decoding row of the step.
            num_drafts: Drafts of the step.

        Returns:
            Tokens from 0 to `cap`: the step with them is predicted to take `seconds` at most, and with one more
            token longer. 0 when not even one fits.
        """
        return self.largest_beside(StepWork.of(others, decode, num_drafts), prefix, seconds, cap)

    def largest_beside(self, work: StepWork, prefix: int, seconds: float, cap: int) -> int:
        """As `largest`, beside a step that was added up.

        Args:
            work: What the step runs already.
            prefix: Tokens before the chunk.
            seconds: Time of the whole step.
            cap: Most tokens.

        Returns:
            Tokens from 0 to `cap`.
        """
        if cap <= 0 or not seconds >= self._with(work, prefix, 1):
            return 0
        if self._with(work, prefix, cap) <= seconds:
            return cap
        k = self.coefficients
        left = seconds - self._with(work, prefix, 0)
        linear = k.token_s + 2.0 * k.pair_s * prefix
        # The root in the form that stays exact when the quadratic term is tiny.
        slope = linear + math.sqrt(linear * linear + 4.0 * k.pair_s * left)
        low = int(min(max(2.0 * left / slope, 1.0), cap - 1.0)) if slope else 1
        if self._with(work, prefix, low) <= seconds < self._with(work, prefix, low + 1):
            return low
        return self._bisect(work, prefix, seconds, cap)

    def observe(
        self, chunks: _Chunks, seconds: float, decode: Sequence[int] = (), *, num_drafts: int = 0
    ) -> None:
        """Keeps a timed step, and refits when enough new ones came.

        Args:
            chunks: Its chunks.
            seconds: How long it took, above 0.
            decode: Tokens before each decoding row.
            num_drafts: Drafts of these rows.

        Raises:
            ConfigError: The duration is no number above 0.
        """
        self.observe_work(StepWork.of(chunks, decode, num_drafts), seconds)

    def observe_work(self, work: StepWork, seconds: float) -> None:
        """As `observe`, for a step that was added up.

        Args:
            work: The sums.
            seconds: How long it took, above 0.

        Raises:
            ConfigError: The duration is no number above 0.
        """
        sample = StepSample(work, seconds)
        self._samples.setdefault(bucket_of(work), deque(maxlen=self.window)).append(sample)
        self._num_new += 1
        if self.refit_every and self._num_new >= self.refit_every:
            self.refit()

    def refit(self, samples: Sequence[StepSample] | None = None) -> FitReport:
        """Fits again; a rejected fit changes nothing but `report`.

        Args:
            samples: Timed steps; None takes those that were observed, with the present coefficients where they say
                little.

        Returns:
            The report.
        """
        from deepinfer.scheduling.cost_fit import fit_step_cost

        if samples is None:
            self._num_new = 0
            prior = self.coefficients if self.is_fitted else None
            samples = [sample for _, kept in sorted(self._samples.items()) for sample in kept]
        else:
            prior = None
        report = fit_step_cost(samples, prior=prior, max_residual_share=self.max_residual_share)
        self.report = report
        if report.is_accepted and report.coefficients is not None:
            self.coefficients = report.coefficients
            self._is_fitted = True
            self.version += 1
        return report

    def to_dict(self) -> dict[str, Any]:
        """Coefficients, fingerprint and version as plain values that `from_dict` takes."""
        return {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "version": self.version,
            "coefficients": asdict(self.coefficients),
        }

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, fingerprint: str | None = None, **options: Any
    ) -> StepTimeModel:
        """Takes a model from plain values.

        Args:
            values: What `to_dict` gave.
            fingerprint: What the model is wanted for; None takes any.
            options: Options of the constructor, such as `refit_every`.

        Returns:
            The model.

        Raises:
            ConfigError: The values are no cost model, or one for something else.
        """
        checks.check_mapping("a step cost model", values, ConfigError)
        if values.get("format") != _FORMAT:
            checks.fail("format", values.get("format"), repr(_FORMAT), ConfigError)
        known = ("format", "fingerprint", "version", "coefficients")
        checks.check_keys("a step cost model", values, known, ConfigError)
        found = values.get("fingerprint", "")
        if fingerprint is not None and found != fingerprint:
            checks.fail(
                "fingerprint",
                found,
                repr(fingerprint),
                ConfigError,
                "Time the steps here and fit again.",
            )
        given = checks.check_mapping("coefficients", values.get("coefficients"), ConfigError)
        fields = StepCoefficients.__dataclass_fields__
        checks.check_keys("coefficients", given, fields, ConfigError)
        return cls(
            StepCoefficients(**given),
            fingerprint=found,
            version=values.get("version", 0),
            **options,
        )

    def save(self, path: str | Path) -> None:
        """Writes the model to a JSON file.

        Args:
            path: The file; it is replaced.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(
        cls, path: str | Path, *, fingerprint: str | None = None, **options: Any
    ) -> StepTimeModel:
        """Reads a model from a JSON file.

        Args:
            path: The file.
            fingerprint: What the model is wanted for; None takes any.
            options: Options of the constructor.

        Returns:
            The model.

        Raises:
            ConfigError: The file holds no cost model, or one for something else.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{path} is no JSON ({error}); give a file that `save` wrote.",
                field="path",
                value=str(path),
            ) from error
        return cls.from_dict(values, fingerprint=fingerprint, **options)

    def _with(self, work: StepWork, prefix: int, tokens: int) -> float:
        return self.seconds(work.plus(prefix, tokens))

    def _bisect(self, work: StepWork, prefix: int, seconds: float, cap: int) -> int:
        fits, too_large = 1, cap
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self._with(work, prefix, middle) <= seconds:
                fits = middle
            else:
                too_large = middle
        return fits

    def __repr__(self) -> str:
        k = self.coefficients
        parts = ", ".join(f"{name}={value:.3g}" for name, value in asdict(k).items() if value)
        return f"StepTimeModel({parts}, version={self.version})"
