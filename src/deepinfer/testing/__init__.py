"""Test doubles and checks that users of deepinfer can run their own parts against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.testing.campaign import CampaignReport as CampaignReport
    from deepinfer.testing.campaign import Violation as Violation
    from deepinfer.testing.campaign import replay_actions as replay_actions
    from deepinfer.testing.campaign import run_campaign as run_campaign
    from deepinfer.testing.campaign import shrink as shrink
    from deepinfer.testing.determinism import Situation as Situation
    from deepinfer.testing.determinism import UniqueResults as UniqueResults
    from deepinfer.testing.determinism import digest as digest
    from deepinfer.testing.determinism import model_logits as model_logits
    from deepinfer.testing.determinism import situations as situations
    from deepinfer.testing.determinism import unique_model_rows as unique_model_rows
    from deepinfer.testing.determinism import unique_rows as unique_rows
    from deepinfer.testing.determinism import unique_streams as unique_streams
    from deepinfer.testing.faults import FaultInjector as FaultInjector
    from deepinfer.testing.faults import FaultyRunner as FaultyRunner
    from deepinfer.testing.faults import JumpingClock as JumpingClock
    from deepinfer.testing.faults import PlantedFault as PlantedFault
    from deepinfer.testing.faults import PlantedInterrupt as PlantedInterrupt
    from deepinfer.testing.faults import RaisingSink as RaisingSink
    from deepinfer.testing.faults import plant as plant
    from deepinfer.testing.invariants import check_all as check_all
    from deepinfer.testing.invariants import check_drained as check_drained
    from deepinfer.testing.invariants import check_pure as check_pure
    from deepinfer.testing.machine import Machine as Machine
    from deepinfer.testing.machine import Mutation as Mutation
    from deepinfer.testing.machine_config import MachineConfig as MachineConfig
    from deepinfer.testing.observed_scheduler import ObservedScheduler as ObservedScheduler
    from deepinfer.testing.observed_scheduler import SchedulerObserver as SchedulerObserver
    from deepinfer.testing.shadow_books import ShadowBooks as ShadowBooks
    from deepinfer.testing.shadow_types import BlockContent as BlockContent
    from deepinfer.testing.shadow_types import Seat as Seat
    from deepinfer.testing.shadow_types import ShadowFlight as ShadowFlight
    from deepinfer.testing.toy_cache import ToyCache as ToyCache
    from deepinfer.testing.toy_model import ToyConfig as ToyConfig
    from deepinfer.testing.toy_model import ToyDraft as ToyDraft
    from deepinfer.testing.toy_model import ToyModel as ToyModel
    from deepinfer.testing.toy_reference import Expected as Expected
    from deepinfer.testing.toy_reference import ToyGrammar as ToyGrammar
    from deepinfer.testing.toy_reference import ToyReference as ToyReference
    from deepinfer.testing.toy_tokenizer import ToyTokenizer as ToyTokenizer
    from deepinfer.testing.trace_player import RecordedCall as RecordedCall
    from deepinfer.testing.trace_player import ScheduleRecorder as ScheduleRecorder
    from deepinfer.testing.trace_player import load_calls as load_calls
    from deepinfer.testing.trace_player import play_calls as play_calls
    from deepinfer.testing.trace_player import save_calls as save_calls
    from deepinfer.testing.traces import TraceRecord as TraceRecord
    from deepinfer.testing.traces import TraceSummary as TraceSummary
    from deepinfer.testing.traces import generate_chat_trace as generate_chat_trace
    from deepinfer.testing.traces import load_azure_csv as load_azure_csv
    from deepinfer.testing.traces import load_lengths_csv as load_lengths_csv
    from deepinfer.testing.traces import load_mooncake_jsonl as load_mooncake_jsonl
    from deepinfer.testing.traces import prompt_tokens as prompt_tokens
    from deepinfer.testing.traces import summarize_trace as summarize_trace
    from deepinfer.testing.traces import to_requests as to_requests

_EXPORTS = {
    "BlockContent": "deepinfer.testing.shadow_types",
    "CampaignReport": "deepinfer.testing.campaign",
    "Expected": "deepinfer.testing.toy_reference",
    "FaultInjector": "deepinfer.testing.faults",
    "FaultyRunner": "deepinfer.testing.faults",
    "JumpingClock": "deepinfer.testing.faults",
    "Machine": "deepinfer.testing.machine",
    "MachineConfig": "deepinfer.testing.machine_config",
    "Mutation": "deepinfer.testing.machine",
    "ObservedScheduler": "deepinfer.testing.observed_scheduler",
    "PlantedFault": "deepinfer.testing.faults",
    "PlantedInterrupt": "deepinfer.testing.faults",
    "RaisingSink": "deepinfer.testing.faults",
    "RecordedCall": "deepinfer.testing.trace_player",
    "ScheduleRecorder": "deepinfer.testing.trace_player",
    "SchedulerObserver": "deepinfer.testing.observed_scheduler",
    "Seat": "deepinfer.testing.shadow_types",
    "ShadowBooks": "deepinfer.testing.shadow_books",
    "ShadowFlight": "deepinfer.testing.shadow_types",
    "Situation": "deepinfer.testing.determinism",
    "ToyCache": "deepinfer.testing.toy_cache",
    "ToyConfig": "deepinfer.testing.toy_model",
    "ToyDraft": "deepinfer.testing.toy_model",
    "ToyGrammar": "deepinfer.testing.toy_reference",
    "ToyModel": "deepinfer.testing.toy_model",
    "ToyReference": "deepinfer.testing.toy_reference",
    "ToyTokenizer": "deepinfer.testing.toy_tokenizer",
    "TraceRecord": "deepinfer.testing.traces",
    "TraceSummary": "deepinfer.testing.traces",
    "UniqueResults": "deepinfer.testing.determinism",
    "Violation": "deepinfer.testing.campaign",
    "check_all": "deepinfer.testing.invariants",
    "check_drained": "deepinfer.testing.invariants",
    "check_pure": "deepinfer.testing.invariants",
    "digest": "deepinfer.testing.determinism",
    "generate_chat_trace": "deepinfer.testing.traces",
    "load_azure_csv": "deepinfer.testing.traces",
    "load_calls": "deepinfer.testing.trace_player",
    "load_lengths_csv": "deepinfer.testing.traces",
    "load_mooncake_jsonl": "deepinfer.testing.traces",
    "model_logits": "deepinfer.testing.determinism",
    "plant": "deepinfer.testing.faults",
    "play_calls": "deepinfer.testing.trace_player",
    "prompt_tokens": "deepinfer.testing.traces",
    "replay_actions": "deepinfer.testing.campaign",
    "run_campaign": "deepinfer.testing.campaign",
    "save_calls": "deepinfer.testing.trace_player",
    "shrink": "deepinfer.testing.campaign",
    "situations": "deepinfer.testing.determinism",
    "summarize_trace": "deepinfer.testing.traces",
    "to_requests": "deepinfer.testing.traces",
    "unique_model_rows": "deepinfer.testing.determinism",
    "unique_rows": "deepinfer.testing.determinism",
    "unique_streams": "deepinfer.testing.determinism",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
