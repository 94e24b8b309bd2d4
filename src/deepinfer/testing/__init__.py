"""Test doubles and checks that users of deepinfer can run their own parts against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.testing.determinism import Situation as Situation
    from deepinfer.testing.determinism import UniqueResults as UniqueResults
    from deepinfer.testing.determinism import digest as digest
    from deepinfer.testing.determinism import model_logits as model_logits
    from deepinfer.testing.determinism import situations as situations
    from deepinfer.testing.determinism import unique_model_rows as unique_model_rows
    from deepinfer.testing.determinism import unique_rows as unique_rows
    from deepinfer.testing.determinism import unique_streams as unique_streams
    from deepinfer.testing.toy_cache import ToyCache as ToyCache
    from deepinfer.testing.toy_model import ToyConfig as ToyConfig
    from deepinfer.testing.toy_model import ToyDraft as ToyDraft
    from deepinfer.testing.toy_model import ToyModel as ToyModel
    from deepinfer.testing.toy_tokenizer import ToyTokenizer as ToyTokenizer
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
    "Situation": "deepinfer.testing.determinism",
    "UniqueResults": "deepinfer.testing.determinism",
    "digest": "deepinfer.testing.determinism",
    "model_logits": "deepinfer.testing.determinism",
    "situations": "deepinfer.testing.determinism",
    "unique_model_rows": "deepinfer.testing.determinism",
    "unique_rows": "deepinfer.testing.determinism",
    "unique_streams": "deepinfer.testing.determinism",
    "ToyCache": "deepinfer.testing.toy_cache",
    "ToyConfig": "deepinfer.testing.toy_model",
    "ToyDraft": "deepinfer.testing.toy_model",
    "ToyModel": "deepinfer.testing.toy_model",
    "ToyTokenizer": "deepinfer.testing.toy_tokenizer",
    "TraceRecord": "deepinfer.testing.traces",
    "TraceSummary": "deepinfer.testing.traces",
    "generate_chat_trace": "deepinfer.testing.traces",
    "load_azure_csv": "deepinfer.testing.traces",
    "load_lengths_csv": "deepinfer.testing.traces",
    "load_mooncake_jsonl": "deepinfer.testing.traces",
    "prompt_tokens": "deepinfer.testing.traces",
    "summarize_trace": "deepinfer.testing.traces",
    "to_requests": "deepinfer.testing.traces",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
