"""Seconds of a step that drafts and verifies, from timed samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._saved import read_json, write_json

__all__ = ["StepCostModel"]

_FORMAT = "deepinfer-verify-cost-1"
_Floats = npt.NDArray[np.float64]


class StepCostModel:
    """Seconds of one round: drafting for some requests, then scoring some rows.

    Rows are rounded up to the next size that was captured as a graph, as the runner pads them; beyond the largest the
    seconds rise as between the last two samples, or as between the first and the last where that is steeper: one noisy
    sample must not make rows free. They never fall when rows are added: a dip is noise, and a planner that believed in it
    would chase it.

    Args:
        tokens: Sampled numbers of rows, rising, at least one.
        seconds: Seconds of each, above 0.
        graph_sizes: Sizes that steps are padded to, rising; empty when every number runs as it is.
        draft: Seconds that drafting adds by number of requests; None costs nothing. Between its samples it is linear.
        plain: Seconds of a step that decodes so many requests and drafts for none, which may run in another way; None
            takes those of as many rows.
        fingerprint: What the samples hold for: the model, the device, the way it runs.

    Raises:
        ConfigError: Samples are missing, out of order or not above 0.

    Examples:
        >>> cost = StepCostModel([8, 16, 32], [1.0, 1.1, 2.0], graph_sizes=[8, 16, 32])
        >>> cost.seconds(1, [1, 8, 9, 32, 48]).tolist()
        [1.0, 1.0, 1.1, 2.0, 2.9]
    """

    def __init__(
        self,
        tokens: Sequence[int],
        seconds: Sequence[float],
        *,
        graph_sizes: Sequence[int] = (),
        draft: Mapping[int, float] | None = None,
        plain: Mapping[int, float] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.tokens = _rising("tokens", tokens)
        self._seconds = np.maximum.accumulate(_positive("seconds", seconds, len(self.tokens)))
        has_sizes = not hasattr(graph_sizes, "__len__") or len(graph_sizes) > 0
        self.graph_sizes = _rising("graph_sizes", graph_sizes) if has_sizes else ()
        self.draft = _by_requests("draft", draft)
        self.plain = _by_requests("plain", plain)
        self.fingerprint = (
            checks.check_text("fingerprint", fingerprint, ConfigError) if fingerprint else ""
        )
        self._table = np.zeros(0)
        self._drafting: dict[int, float] = {}  # by requests, as asked for

    @classmethod
    def from_samples(
        cls,
        tokens: Sequence[int],
        seconds: Sequence[float],
        *,
        graph_sizes: Sequence[int] = (),
        draft: Mapping[int, float] | None = None,
        plain: Mapping[int, float] | None = None,
        fingerprint: str = "",
    ) -> StepCostModel:
        """A model from raw timings: of several of one size the median counts.

        Args:
            tokens: Rows of each timed step, in any order.
            seconds: Its seconds.
            graph_sizes: Sizes that steps are padded to.
            draft: Seconds that drafting adds by number of requests.
            plain: Seconds of steps without drafts by number of requests.
            fingerprint: What the samples hold for.

        Returns:
            The model.

        Raises:
            ConfigError: There is no sample, or a number is out of range.
        """
        if len(tokens) != len(seconds):
            checks.fail(
                "seconds", len(seconds), f"as many as there are tokens, {len(tokens)}", ConfigError
            )
        groups: dict[int, list[float]] = {}
        for count, value in zip(tokens, seconds, strict=True):
            size = checks.check_int("tokens", count, 1, 2**31, ConfigError)
            groups.setdefault(size, []).append(float(value))
        sizes = sorted(groups)
        medians = [float(np.median(groups[size])) for size in sizes]
        return cls(
            sizes,
            medians,
            graph_sizes=graph_sizes,
            draft=draft,
            plain=plain,
            fingerprint=fingerprint,
        )

    @classmethod
    def additive(
        cls,
        fixed_s: float,
        row_s: float,
        *,
        request_s: float = 0.0,
        graph_sizes: Sequence[int] = (),
        max_requests: int = 4096,
    ) -> StepCostModel:
        """A straight line.

        Args:
            fixed_s: Seconds of a step that runs nothing.
            row_s: Seconds a row, the anchor's included.
            request_s: Seconds of drafting a request.
            graph_sizes: Sizes that steps are padded to.
            max_requests: Most requests that drafting is priced for.

        Returns:
            The model.

        Raises:
            ConfigError: A number is negative, or all are 0.
        """
        for name, value in (("fixed_s", fixed_s), ("row_s", row_s), ("request_s", request_s)):
            checks.check_float(name, value, 0.0, 1e9, ConfigError)
        draft = {0: 0.0, max_requests: request_s * max_requests} if request_s else None
        return cls(
            [1, 2], [fixed_s + row_s, fixed_s + 2 * row_s], graph_sizes=graph_sizes, draft=draft
        )

    @property
    def is_flat(self) -> bool:
        """Whether rows cost nothing, so that verifying everything always looks best."""
        return bool(self._seconds[-1] <= self._seconds[0])

    def seconds(self, num_requests: int, num_tokens: Any) -> _Floats:
        """Seconds of rounds.

        Args:
            num_requests: Requests that are drafted for.
            num_tokens: Rows to score, anchors included, any shape, integers from 0.

        Returns:
            Seconds, shaped like `num_tokens`, float64.

        Raises:
            ConfigError: A number of rows is negative or no integer.
        """
        given: npt.NDArray[Any] = np.asarray(num_tokens)
        counts: npt.NDArray[np.int64]
        counts = given.astype(np.int64) if given.dtype.kind in "iuf" else np.full(1, -1)
        if counts.size and (counts.min() < 0 or (counts != given).any()):
            checks.fail("num_tokens", num_tokens, "integers from 0", ConfigError)
        table = self.table(int(counts.max(initial=0)) + 1)
        found: _Floats = table[counts] + self.draft_seconds(num_requests)
        return found

    def table(self, size: int) -> _Floats:
        """Seconds of scoring 0, 1, 2, ... rows, drafting left out.

        Args:
            size: How many entries at least.

        Returns:
            Seconds, shape [at least size]; read only.
        """
        if self._table.size < size:
            self._table = self._verify_seconds(np.arange(max(size, 2 * self._table.size, 256)))
            self._table.setflags(write=False)
        return self._table

    def draft_seconds(self, num_requests: int) -> float:
        """Seconds of drafting.

        Args:
            num_requests: Requests that are drafted for.

        Returns:
            Seconds; beyond the last sample they rise as rows' do.
        """
        if not self.draft or num_requests <= 0:
            return 0.0
        found = self._drafting.get(num_requests)
        if found is None:
            found = self._drafting[num_requests] = _at(self.draft, num_requests)
        return found

    def plain_seconds(self, num_requests: int) -> float:
        """Seconds of a step without drafts.

        Args:
            num_requests: Requests that decode, at least 1.

        Returns:
            Seconds.
        """
        if self.plain:
            return _at(self.plain, num_requests)
        return float(self.table(num_requests + 1)[num_requests])

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes."""
        return {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "tokens": list(self.tokens),
            "seconds": self._seconds.tolist(),
            "graph_sizes": list(self.graph_sizes),
            "draft": [[count, value] for count, value in self.draft.items()],
            "plain": [[count, value] for count, value in self.plain.items()],
        }

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, fingerprint: str | None = None
    ) -> StepCostModel:
        """Takes a model from plain values.

        Args:
            values: What `to_dict` gave.
            fingerprint: What the model is wanted for; None takes any.

        Returns:
            The model.

        Raises:
            ConfigError: The values are no such model, or one for something else.
        """
        checks.check_mapping("a step cost model", values, ConfigError)
        if values.get("format") != _FORMAT:
            checks.fail("format", values.get("format"), repr(_FORMAT), ConfigError)
        found = values.get("fingerprint", "")
        if fingerprint is not None and found != fingerprint:
            hint = "Time the steps here again."
            checks.fail("fingerprint", found, repr(fingerprint), ConfigError, hint)
        try:
            return cls(
                values.get("tokens", ()),
                values.get("seconds", ()),
                graph_sizes=values.get("graph_sizes", ()),
                draft=dict(values.get("draft", ())),
                plain=dict(values.get("plain", ())),
                fingerprint=found,
            )
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the values of the step cost model are not whole ({error}); give what `to_dict` gave.",
                field="values",
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes the model to a JSON file.

        Args:
            path: The file; it is replaced.
        """
        write_json(path, self.to_dict(), indent=2)

    @classmethod
    def load(cls, path: str | Path, *, fingerprint: str | None = None) -> StepCostModel:
        """Reads a model from a JSON file.

        Args:
            path: The file.
            fingerprint: What the model is wanted for; None takes any.

        Returns:
            The model.

        Raises:
            ConfigError: The file holds no such model, or one for something else.
        """
        return cls.from_dict(read_json(path, "step cost model"), fingerprint=fingerprint)

    def _verify_seconds(self, counts: npt.NDArray[np.int64]) -> _Floats:
        sizes = np.asarray(self.graph_sizes, np.int64)
        if sizes.size:
            at = np.searchsorted(sizes, counts)
            counts = np.where(counts <= sizes[-1], sizes[np.minimum(at, sizes.size - 1)], counts)
        known = np.asarray(self.tokens, float)
        seconds = np.interp(counts, known, self._seconds)
        if known.size > 1:
            slope = _slope(known, self._seconds)
            seconds = seconds + slope * np.maximum(counts - known[-1], 0.0)
        return np.asarray(seconds, float)

    def __repr__(self) -> str:
        sizes = f", graph_sizes={len(self.graph_sizes)}" if self.graph_sizes else ""
        return f"StepCostModel({len(self.tokens)} samples up to {self.tokens[-1]} rows{sizes})"


def _rising(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        checks.fail(name, values, "rising numbers from 1, at least one", ConfigError)
    found = tuple(values)
    for value in found:
        checks.check_int(name, value, 1, 2**31, ConfigError)
    if not found or any(low >= high for low, high in itertools.pairwise(found)):
        checks.fail(name, values, "rising numbers from 1, at least one", ConfigError)
    return found


def _by_requests(name: str, values: Mapping[int, float] | None) -> dict[int, float]:
    found = {}
    if not isinstance(values, Mapping | None):
        limit = "seconds by number of requests, a mapping"
        checks.fail(name, values, limit, ConfigError)
    for count, value in (values or {}).items():
        number = checks.check_int(name, count, 0, 2**31, ConfigError)
        found[number] = checks.check_float(name, value, 0.0, 1e9, ConfigError)
    return dict(sorted(found.items()))


def _at(samples: Mapping[int, float], count: int) -> float:
    """Between samples along the line, beyond the last with the slope there."""
    counts, values = list(samples), list(samples.values())
    if count > counts[-1] and len(counts) > 1:
        return values[-1] + _slope(counts, values) * (count - counts[-1])
    return float(np.interp(count, counts, values))


def _slope(counts: Any, values: Any) -> float:
    """Slope behind the last sample, of two or more."""
    pairs = [(values[-1] - values[at]) / (counts[-1] - counts[at]) for at in (-2, 0)]
    return max(0.0, *map(float, pairs))


def _positive(name: str, values: Sequence[float], count: int) -> _Floats:
    if isinstance(values, str) or not isinstance(values, Iterable):
        checks.fail(name, values, "numbers above 0", ConfigError)
    found = [
        checks.check_float(name, value, 0.0, 1e9, ConfigError, open_low=True) for value in values
    ]
    if len(found) != count:
        checks.fail(name, values, f"{count} numbers, one a sample", ConfigError)
    return np.array(found)
