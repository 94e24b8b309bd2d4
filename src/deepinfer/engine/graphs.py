"""Decode and verify steps recorded as CUDA graphs, by shape.

A recorded step is launched with one call, whatever its number of kernels. There is one recording for each bucket: a
number of rows, of tokens a row, and of tokens of context. Verify steps run each token as a row of its own, so what they
cost is the number of all tokens, rounded up. A step takes the cheapest bucket that it fits, and what fits none runs
eagerly. Recordings share one pool of memory, so what one gives is valid until the next runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.graph_buckets import GraphBucket as GraphBucket
from deepinfer.engine.graph_buckets import GraphStats as GraphStats
from deepinfer.engine.graph_buckets import WarmupReport as WarmupReport
from deepinfer.engine.graph_buckets import bucket_for, check_bucket
from deepinfer.engine.graph_buckets import context_buckets as context_buckets
from deepinfer.engine.graph_buckets import row_buckets as row_buckets
from deepinfer.engine.graph_inputs import StepInputs, fill_verify, make_inputs
from deepinfer.engine.graph_steps import GraphRow as GraphRow
from deepinfer.engine.graph_steps import GraphRun as GraphRun
from deepinfer.engine.graph_steps import RecordedStep, StepColumns
from deepinfer.engine.layout import Layout
from deepinfer.engine.recording import record_call, reserved_bytes
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_books import DecodeRows, begin_rows, commit_rows
from deepinfer.models.deepseek_v41.decode_inputs import cannot_decode, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeOutput, DecodeStep, why_no_fixed_shape
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.verify_books import VerifyRows

__all__ = [
    "DecodeGraphs",
    "GraphBucket",
    "GraphRow",
    "GraphRun",
    "GraphStats",
    "WarmupReport",
    "context_buckets",
    "row_buckets",
]

Ints = NDArray[np.int64]

_STAGING_BUFFERS = 2


class DecodeGraphs:
    """Runs decode and verify steps from recordings.

    Where there is no GPU, a recording is a call of the step: the same results, and no faster.

    Args:
        model: The model.
        cache: Its cache; recordings hold its addresses.
        future: Token sampled last for each slot, shape [slots], int64, in a tensor that stays where it is; None when
            the host knows all ids.
        feed: Takes the draft features of a step in the recording itself, see `DecodeStep`; None to give them.
        on_demand: Record a shape, see `bucket_for`, when a step comes that fits none; that step waits for the recording.

    Attributes:
        feed: As given.
        on_demand: As given.
        stats: How steps fared.
        unsupported: Why no step can be recorded, or "".

    Examples:
        On a CUDA device:

            graphs = DecodeGraphs(model, cache)
            graphs.warmup([GraphBucket(rows=16, tokens=1, context=1024)])
            run = graphs.try_run([GraphRow(Segment(slot=0, start=7, num_tokens=1), [42])])
            logits = run.logits[run.offsets[0]]
    """

    def __init__(
        self,
        model: DeepseekV41,
        cache: SlotCache,
        *,
        future: Tensor | None = None,
        feed: Callable[[Tensor, Tensor, Tensor], None] | None = None,
        on_demand: bool = False,
    ) -> None:
        self.feed = feed
        self.on_demand = on_demand
        self.stats = GraphStats()
        self.unsupported = why_no_fixed_shape(model, cache)
        self._model = model
        self._cache = cache
        self._future = future
        self._device = cache.device
        self._step = None if self.unsupported else DecodeStep(model, cache)
        self._recordings: dict[GraphBucket, RecordedStep] = {}
        self._by_rows: dict[tuple[int, int, int, bool], list[GraphBucket]] = {}
        self._staging: dict[tuple[int, int], list[tuple[StepInputs, Any]]] = {}
        self._pool: Any = None
        self._turn = 0

    @property
    def buckets(self) -> tuple[GraphBucket, ...]:
        """The recorded shapes."""
        return tuple(self._recordings)

    def warmup(self, buckets: Iterable[GraphBucket]) -> WarmupReport:
        """Records shapes; those that were recorded before stay. Nothing may run on the device meanwhile.

        Args:
            buckets: The shapes.

        Returns:
            What was recorded, and what it cost; nothing, and why, when a shape cannot be recorded.

        Raises:
            ConfigError: A shape has no rows or tokens, or more tokens than a cache slot.
        """
        began, step = time.perf_counter(), self._step
        if step is None:
            return WarmupReport((), 0.0, 0, self.unsupported)
        wanted = sorted(set(buckets) - set(self._recordings), reverse=True)
        for bucket in wanted:
            check_bucket(bucket, self._cache)
        self._by_rows.clear()
        before = reserved_bytes(self._device)
        # The largest first: its memory serves the others.
        for bucket in sorted(wanted, key=lambda b: (b.rows * b.tokens, b.context), reverse=True):
            try:
                self._recordings[bucket] = self._record(step, bucket)
            except (
                RuntimeError
            ) as error:  # an operation that waits for the device cannot be recorded
                self.close()
                self.unsupported = f"{bucket} could not be recorded: {error}"
                return WarmupReport((), time.perf_counter() - began, 0, self.unsupported)
        return WarmupReport(
            tuple(wanted),
            time.perf_counter() - began,
            max(0, reserved_bytes(self._device) - before),
        )

    def try_run(
        self, rows: Sequence[GraphRow], *, features: bool = True, copy_features: bool = False
    ) -> GraphRun | None:
        """Runs a step if a recording fits it; nothing waits for the device.

        Args:
            rows: The step. The cache's books are kept here as in `DeepseekV41.forward`.
            features: Whether the draft is to learn of the tokens.
            copy_features: Give features in a tensor of their own, for use after the next step was launched.

        Returns:
            What the step gave, or None if it has to run eagerly, in which case nothing has changed.

        Raises:
            InvariantBroken: A segment does not continue its slot.
            RequestTooLong: A segment does not fit its slot.
        """
        found = self._find(rows, features)
        if isinstance(found, str):
            self.stats.misses[found] += 1
            return None
        bucket, recording = found
        segments = tuple(row.segment for row in rows)
        self._cache.begin(segments)
        floors = self._cache.full_floors(segments)
        values = [
            row_values(row.segment, floor, from_future=row.from_future)
            for row, floor in zip(rows, floors, strict=True)
        ]
        ids = [row.ids for row in rows]
        counts = [s.num_tokens for s in segments]
        if bucket.tokens > 1:
            offsets = tuple(range(0, len(rows) * bucket.tokens, bucket.tokens))
            self._send(recording, lambda host: host.inputs.fill(ids, values))
        else:
            offsets = tuple(itertools.accumulate(counts[:-1], initial=0))
            self._send(recording, lambda host: host.inputs.fill_tokens(ids, values))
        output = recording.replay()
        self._cache.commit(segments)
        return self._ran(bucket, output, offsets, sum(counts), copy_features=copy_features)

    def try_run_decode(
        self,
        rows: DecodeRows,
        ids: Ints,
        is_future: NDArray[np.bool_] | None,
        *,
        features: bool = True,
    ) -> GraphRun | None:
        """`try_run` for rows of one token each, whose slots differ, at little cost a row.

        Args:
            rows: The rows.
            ids: Their ids, shape [rows], int64.
            is_future: Whether the id is the one sampled last for the slot instead, shape [rows], bool; None for nowhere.
            features: Whether the draft is to learn of the tokens.

        Returns:
            What the step gave, or None if it has to run eagerly, in which case nothing has changed.

        Raises:
            InvariantBroken: A row does not continue its slot.
            RequestTooLong: A row does not fit its slot.
        """
        shape = self._fitting(len(rows), 1, len(rows), int(rows.starts.max()) + 1, features)
        found: tuple[GraphBucket, RecordedStep] | str
        if isinstance(shape, str):
            found = shape
        else:
            found = self._usable(shape, replays=rows.replays, needs_future=is_future is not None)
        if isinstance(found, str):
            self.stats.misses[found] += 1
            return None
        bucket, recording = found
        floors = begin_rows(self._cache, rows)
        columns = (rows.starts, rows.host_slots, rows.window_starts, floors)
        self._send(recording, lambda host: host.inputs.fill_decode(ids, is_future, columns))
        output = recording.replay()
        commit_rows(self._cache, rows)
        offsets = range(0, len(rows) * bucket.tokens, bucket.tokens)
        return self._ran(bucket, output, offsets, len(rows), copy_features=False)

    def try_run_tokens(
        self,
        columns: StepColumns,
        layout: Layout,
        input_ids: Callable[[], Ints],
        drafts: Tensor | None = None,
    ) -> GraphRun | None:
        """`try_run` for rows of several known tokens, at little cost a row; features are fed.

        Args:
            columns: The rows.
            layout: Where their tokens lie.
            input_ids: Gives the ids, shape [tokens], int64.
            drafts: Ids of all tokens but the first of each row, of rows of one length, where only the device knows them,
                shape [rows, tokens - 1], int64.

        Returns:
            What the step gave, one row of logits a token from the first on; None if it has to run in another way, in
            which case nothing has changed.

        Raises:
            InvariantBroken: A row does not continue its slot.
            RequestTooLong: A row does not fit its slot.
        """
        rows = VerifyRows(*columns)
        if rows.why_not(self._cache):
            return None
        longest, end = int(rows.counts.max()), int((rows.starts + rows.counts).max())
        shape = self._fitting(len(rows), longest, layout.total, end, True)
        if isinstance(shape, str) or shape.tokens > 1:
            return None
        found = self._usable(shape, replays=False, needs_future=False)
        if isinstance(found, str):
            return None
        bucket, recording = found
        floors = begin_rows(self._cache, rows)
        ids, values = input_ids(), (rows.starts, rows.host_slots, rows.window_starts, floors)
        self._send(recording, lambda host: fill_verify(host, ids, layout, values))
        if drafts is not None:
            recording.behind_first(len(rows), longest).copy_(drafts)
        output = recording.replay()
        commit_rows(self._cache, rows)
        return self._ran(bucket, output, range(layout.total), layout.total, copy_features=False)

    def _ran(
        self,
        bucket: GraphBucket,
        output: DecodeOutput,
        offsets: Sequence[int],
        used: int,
        *,
        copy_features: bool,
    ) -> GraphRun:
        self.stats.hits[bucket] += 1
        self.stats.tokens += used
        self.stats.padded_tokens += bucket.rows * bucket.tokens - used
        features = output.features
        if features is not None and copy_features:
            features = features.clone()
        is_fed = self.feed is not None and bucket.features
        return GraphRun(bucket, output.logits, output.hidden, features, is_fed, offsets)

    def close(self) -> None:
        """Drops the recordings and their memory."""
        self._recordings.clear()
        self._by_rows.clear()
        self._staging.clear()
        self._pool = None

    def _find(
        self, rows: Sequence[GraphRow], features: bool
    ) -> tuple[GraphBucket, RecordedStep] | str:
        if not rows:
            return "unsupported" if self.unsupported else "no rows"
        segments = [row.segment for row in rows]
        counts = [s.num_tokens for s in segments]
        end = max(s.end for s in segments)
        found = self._fitting(len(rows), max(counts), sum(counts), end, features)
        if isinstance(found, str):
            return found
        replays = bool(cannot_decode(segments, self._cache))
        needs_future = any(row.from_future for row in rows)
        return self._usable(found, replays=replays, needs_future=needs_future)

    def _fitting(
        self, rows: int, longest: int, tokens: int, context: int, features: bool
    ) -> GraphBucket | str:
        """The cheapest recorded shape that holds so much, or why there is none."""
        if self.unsupported:
            return "unsupported"
        features = features and self._cache.config.num_nextn_predict_layers > 0
        key = (rows, longest, tokens, features)
        fitting = self._by_rows.get(key)
        if fitting is None:
            fitting = [
                b
                for b in self._recordings
                if (
                    (b.tokens == 1 and b.rows >= tokens) or (b.rows >= rows and b.tokens >= longest)
                )
                and (b.features or not features)
            ]
            fitting.sort(key=lambda b: (b.rows * b.tokens, b.features, b.context))
            self._by_rows[key] = fitting
        found = next((b for b in fitting if b.context >= context), None)
        if not self.on_demand:
            return "no bucket" if found is None else found
        cache, most = self._cache, self._cache.max_rollback + 1
        new = bucket_for(
            tokens, context, most_rows=cache.num_slots * most, most_context=cache.max_tokens,
            features=features,
        )  # fmt: skip
        if (
            found is not None
            and found.rows * found.tokens <= new.rows
            and found.features == features
        ):
            return found
        if longest > most or context > new.context:
            return "no bucket"
        return new if self.warmup([new]).buckets else "unsupported"

    def _usable(
        self, bucket: GraphBucket, *, replays: bool, needs_future: bool
    ) -> tuple[GraphBucket, RecordedStep] | str:
        if replays:
            return "not a decode step"
        if self._future is None and needs_future:
            return "ids unknown"
        recording = self._recordings[bucket]
        if recording.deterministic != self._model.deterministic:
            return "other arithmetic"
        return bucket, recording

    def _record(self, step: DecodeStep, bucket: GraphBucket) -> RecordedStep:
        inputs = make_inputs(bucket.rows, bucket.tokens, self._device)

        def run() -> DecodeOutput:
            return step(
                inputs.inputs,
                bucket.context,
                self._future,
                with_features=bucket.features,
                feed=self.feed,
            )

        if self._device.type != "cuda":
            return RecordedStep(inputs, run, self._model.deterministic)
        graph, output = record_call(run, self._device, self._pool)
        if self._pool is None:
            self._pool = graph.pool()
        return RecordedStep(inputs, run, self._model.deterministic, graph, output)

    def _send(self, recording: RecordedStep, fill: Callable[[StepInputs], None]) -> None:
        if self._device.type != "cuda":
            fill(recording.inputs)
            return
        inputs = recording.inputs.inputs
        shape = inputs.num_rows, inputs.tokens_per_row
        if shape not in self._staging:
            self._staging[shape] = [
                (make_inputs(*shape, pinned=True), torch.cuda.Event())
                for _ in range(_STAGING_BUFFERS)
            ]
        self._turn += 1
        host, sent = self._staging[shape][self._turn % _STAGING_BUFFERS]
        sent.synchronize()  # the copy of two steps ago
        fill(host)
        recording.inputs.flat.copy_(host.flat, non_blocking=True)
        sent.record()
