"""`Engine.generate`: many prompts to their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import DeepInferError, RequestError
from deepinfer.core.protocols import ProgressFn
from deepinfer.core.types import FinishReason, Output, OutputDelta
from deepinfer.engine.outputs import OutputBuilder, as_request_error
from deepinfer.engine.progress import progress_bar
from deepinfer.engine.prompts import Prompt, as_params, split_prompts

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine

__all__ = ["Batch", "generate"]


class Batch:
    """Counts the samples of one call that are done.

    Attributes:
        total: Samples in all.
        done: Samples finished.
        only_ends: As in `deepinfer.engine.outputs.Sink`: tokens are looked at once all is done.
    """

    only_ends = True

    def __init__(self) -> None:
        self.total = 0
        self.done = 0

    def __call__(self, delta: OutputDelta) -> None:
        """Takes a delta.

        Args:
            delta: The delta; only its end counts.
        """
        self.done += delta.finished


def generate(
    engine: Engine,
    prompts: Prompt | Iterable[Prompt],
    params: Any,
    progress: bool | ProgressFn | None,
    *,
    raise_errors: bool,
    cache_salt: str | None = None,
) -> list[Output]:
    """Runs an engine until some prompts are continued; leaving early aborts them.

    Args:
        engine: The engine.
        prompts: As in `Engine.generate`.
        params: As in `Engine.generate`.
        progress: As in `Engine.generate`.
        raise_errors: Raise errors instead of returning them in outputs.
        cache_salt: As in `Engine.generate`.

    Returns:
        The outputs in order of the prompts.

    Raises:
        DeepInferError: As `Engine.generate` says.
    """
    items = split_prompts(prompts)
    all_params = as_params(params, len(items))
    batch = Batch()
    rids: list[str] = []
    entries: list[Sequence[OutputBuilder] | Output] = []
    try:
        for prompt, one in zip(items, all_params, strict=True):
            rids.append(engine._new_rid())  # before it runs, so that an interrupt cannot lose it
            try:
                builders = engine._submit(prompt, one, batch, rids[-1], cache_salt=cache_salt)
            except Exception as error:
                if raise_errors:
                    raise
                entries.append(_refused(error, rids[-1]))
                continue
            entries.append(builders)
            batch.total += len(builders)
        with progress_bar(progress, batch.total, many=len(items) > 1) as report:
            while batch.done < batch.total:
                if not engine._advance() and batch.done < batch.total:
                    engine._loop.raise_if_paused()
                    raise RequestError("an interrupt took the end of a request; run it again.")
                report(batch.done, batch.total)
    except BaseException:
        for rid in rids:
            engine.abort(rid)
        raise
    outputs: list[Output] = []
    for entry in entries:
        outputs += [entry] if isinstance(entry, Output) else [b.output() for b in entry]
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None and raise_errors:
        failed.outputs = outputs  # type: ignore[attr-defined]
        raise failed
    return outputs


def _refused(error: Exception, rid: str) -> Output:
    typed = error if isinstance(error, DeepInferError) else as_request_error(error, rid)
    return Output(rid=rid, finish_reason=FinishReason.ERROR, error=typed)
