"""Types, plans, protocols, errors, configuration: what every other part of deepinfer stands on.

Needs the standard library only; names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.core import errors as errors
    from deepinfer.core.clock import Clock as Clock
    from deepinfer.core.clock import FakeClock as FakeClock
    from deepinfer.core.clock import MonotonicClock as MonotonicClock
    from deepinfer.core.config import EngineConfig as EngineConfig
    from deepinfer.core.events import Event as Event
    from deepinfer.core.events import MemorySink as MemorySink
    from deepinfer.core.events import NullSink as NullSink
    from deepinfer.core.params import SamplingParams as SamplingParams
    from deepinfer.core.plan import BlockUpdate as BlockUpdate
    from deepinfer.core.plan import CacheCopy as CacheCopy
    from deepinfer.core.plan import CopyKind as CopyKind
    from deepinfer.core.plan import LoadSnapshot as LoadSnapshot
    from deepinfer.core.plan import PlanRow as PlanRow
    from deepinfer.core.plan import PlanRows as PlanRows
    from deepinfer.core.plan import RowResult as RowResult
    from deepinfer.core.plan import RowResults as RowResults
    from deepinfer.core.plan import RowRole as RowRole
    from deepinfer.core.plan import StepPlan as StepPlan
    from deepinfer.core.plan import StepResult as StepResult
    from deepinfer.core.registry import Registry as Registry
    from deepinfer.core.types import FinishReason as FinishReason
    from deepinfer.core.types import Output as Output
    from deepinfer.core.types import OutputDelta as OutputDelta
    from deepinfer.core.types import Request as Request
    from deepinfer.core.types import TokenLogprob as TokenLogprob
    from deepinfer.core.types import Usage as Usage

_EXPORTS = {
    "BlockUpdate": "deepinfer.core.plan",
    "CacheCopy": "deepinfer.core.plan",
    "Clock": "deepinfer.core.clock",
    "CopyKind": "deepinfer.core.plan",
    "EngineConfig": "deepinfer.core.config",
    "Event": "deepinfer.core.events",
    "FakeClock": "deepinfer.core.clock",
    "FinishReason": "deepinfer.core.types",
    "LoadSnapshot": "deepinfer.core.plan",
    "MemorySink": "deepinfer.core.events",
    "MonotonicClock": "deepinfer.core.clock",
    "NullSink": "deepinfer.core.events",
    "Output": "deepinfer.core.types",
    "OutputDelta": "deepinfer.core.types",
    "PlanRow": "deepinfer.core.plan",
    "PlanRows": "deepinfer.core.plan",
    "Registry": "deepinfer.core.registry",
    "Request": "deepinfer.core.types",
    "RowResult": "deepinfer.core.plan",
    "RowResults": "deepinfer.core.plan",
    "RowRole": "deepinfer.core.plan",
    "SamplingParams": "deepinfer.core.params",
    "StepPlan": "deepinfer.core.plan",
    "StepResult": "deepinfer.core.plan",
    "TokenLogprob": "deepinfer.core.types",
    "Usage": "deepinfer.core.types",
    "errors": "deepinfer.core.errors:",
}

__all__ = [
    "BlockUpdate",
    "CacheCopy",
    "Clock",
    "CopyKind",
    "EngineConfig",
    "Event",
    "FakeClock",
    "FinishReason",
    "LoadSnapshot",
    "MemorySink",
    "MonotonicClock",
    "NullSink",
    "Output",
    "OutputDelta",
    "PlanRow",
    "PlanRows",
    "Registry",
    "Request",
    "RowResult",
    "RowResults",
    "RowRole",
    "SamplingParams",
    "StepPlan",
    "StepResult",
    "TokenLogprob",
    "Usage",
    "errors",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
