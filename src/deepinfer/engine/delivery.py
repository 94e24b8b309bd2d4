"""What steps changed, to the outputs and to those who wait for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepinfer.core.types import FinishReason, OutputDelta
from deepinfer.engine.constraints import GrammarMasks
from deepinfer.engine.outputs import OutputBuilder
from deepinfer.engine.parts import EngineScheduler
from deepinfer.engine.stats import StatsRecorder
from deepinfer.scheduling import Progress, ProgressList
from deepinfer.scheduling.progress import ProgressBlocks

__all__ = ["Delivery"]

_FEW = 8


class Delivery:
    """The part of an `EngineLoop` that hands tokens on."""

    scheduler: EngineScheduler
    recorder: StatsRecorder
    _live: dict[str, OutputBuilder]
    _masks: GrammarMasks

    def _end(
        self, builder: OutputBuilder, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        raise NotImplementedError

    def _forget(self, builder: OutputBuilder) -> None:
        raise NotImplementedError

    def _emit(self, builder: OutputBuilder, delta: object) -> None:
        raise NotImplementedError

    def _deliver_all(self, progress: Sequence[Progress], now: float) -> None:
        """Hands on what a step changed, in the order of the plan."""
        if not isinstance(progress, ProgressList):
            for entry in progress:
                self._deliver(entry, now)
            return
        blocks = progress.blocks()
        if blocks is not None:
            self._deliver_blocks(progress, blocks, now)
            return
        live = self._live
        last_s, count = 0.0, 0  # outputs in a row whose last tokens came at the same time
        tokens = progress.tokens()
        entries: Sequence[Progress] = progress if tokens.count(-1) <= _FEW else list(progress)
        for at, (token, sequence) in enumerate(zip(tokens, progress.sequences, strict=True)):
            builder = live.get(sequence.request.rid)
            if builder is None:
                continue
            before_s = builder.last_token_s
            if token < 0 or before_s is None or not builder.takes_tokens:
                self._deliver(entries[at], now)
                continue
            try:
                delta = builder.push_token(token, now)
            except Exception as error:
                self._end(builder, FinishReason.ERROR, error)
                continue
            if before_s == last_s:
                count += 1
            else:
                if count:
                    self.recorder.next_tokens(last_s, count, now)
                last_s, count = before_s, 1
            if delta is not None:
                self._hand_on(builder, delta, now)
        if count:
            self.recorder.next_tokens(last_s, count, now)

    def _deliver_blocks(self, progress: ProgressList, blocks: ProgressBlocks, now: float) -> None:
        """Hands on what a step of decoding and verifying rows changed."""
        find, tokens = self._live.get, blocks.token_ids
        counts: list[int] = []  # of outputs in a row whose last tokens came at the same time
        last_s = 0.0
        others: set[int] = set()
        rows = zip(
            progress.sequences, blocks.offsets, blocks.counts, blocks.drafts, blocks.accepted, strict=True
        )  # fmt: skip
        for at, (sequence, first, count, verified, accepted) in enumerate(rows):
            builder = find(sequence.request.rid)
            if builder is None:
                others.add(at)
                continue
            before_s = builder.last_token_s
            if not count or before_s is None or not builder.takes_blocks:
                others.add(at)
                self._deliver(progress[at], now)
                continue
            try:
                delta = builder.push_block(tokens[first : first + count], verified, accepted, now)
            except Exception as error:
                others.add(at)
                self._end(builder, FinishReason.ERROR, error)
                continue
            if before_s != last_s:
                if counts:
                    self.recorder.next_blocks(last_s, counts, now)
                last_s, counts = before_s, []
            counts.append(count)
            if delta is not None:
                self._emit(builder, delta)
        if counts:
            self.recorder.next_blocks(last_s, counts, now)
        drafts = blocks.drafts
        columns = [blocks.proposed, drafts, blocks.accepted]
        if others or 0 in drafts:
            kept = [at for at, count in enumerate(drafts) if count and at not in others]
            columns = [[column[at] for at in kept] for column in columns]
        self.recorder.all_drafts(*columns)

    def _deliver(self, progress: Progress, now: float) -> None:
        builder = self._live.get(progress.request.rid)
        if builder is None:
            return
        try:
            if len(self._masks):
                progress = self._constrain(progress)
            last_s, before = builder.last_token_s, builder.drafts
            delta = builder.push(progress, now)
        except Exception as error:
            self._end(builder, FinishReason.ERROR, error)
            return
        if delta is None:
            return
        if delta.token_ids:
            self.recorder.token(builder, last_s, len(delta.token_ids), now)
        if builder.drafts != before:
            verified, accepted = builder.drafts
            proposed = len(progress.results.draft_confidences.get(progress.index, ()))
            self.recorder.drafts(verified - before[0], accepted - before[1], proposed)
        if delta.finished or not builder.wants_ends_only:
            self._hand_on(builder, delta, now)

    def _hand_on(self, builder: OutputBuilder, delta: OutputDelta, now: float) -> None:
        if delta.finish_reason is not None:
            self.scheduler.abort(builder.rid)  # at a stop string it does not know of the end
            self._forget(builder)
            self.recorder.finished(builder, now)
        self._emit(builder, delta)

    def _constrain(self, progress: Progress) -> Progress:
        rid, tokens = progress.request.rid, progress.token_ids
        end = self._masks.end_of(rid, tokens)
        if end is not None:
            progress = dataclasses.replace(
                progress,
                token_ids=tokens[: end + 1],
                finish_reason=FinishReason.STOP,
                stop_token_id=tokens[end],
            )
            tokens = progress.token_ids
        if progress.stop_token_id is not None:
            tokens = tokens[:-1]
        count = self._masks.accept(rid, tokens)
        if count is None:
            return progress
        if count < len(progress.token_ids):  # what came behind it in a block of drafts
            return dataclasses.replace(
                progress,
                token_ids=tokens[:count],
                finish_reason=FinishReason.STOP,
                stop_token_id=None,
            )
        if progress.finish_reason is None:
            return dataclasses.replace(progress, finish_reason=FinishReason.STOP)
        return progress
