"""The engine and its wiring: prompts, tokenizer, chat format, runner, step loop, outputs.

`Engine` generates text; `AsyncEngine` is its asyncio twin. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.engine.async_engine import AsyncEngine as AsyncEngine
    from deepinfer.engine.async_engine import AsyncTokenStream as AsyncTokenStream
    from deepinfer.engine.chat import ChatPrompt as ChatPrompt
    from deepinfer.engine.chat import encode_messages as encode_messages
    from deepinfer.engine.chat import render_chat as render_chat
    from deepinfer.engine.chat_parser import ChatParser as ChatParser
    from deepinfer.engine.chat_parser import parse_completion as parse_completion
    from deepinfer.engine.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from deepinfer.engine.drafter import DRAFTERS as DRAFTERS
    from deepinfer.engine.drafter import DSparkDrafter as DSparkDrafter
    from deepinfer.engine.engine import Engine as Engine
    from deepinfer.engine.future_tokens import FutureTokens as FutureTokens
    from deepinfer.engine.host_tier import HostTier as HostTier
    from deepinfer.engine.latency import Latency as Latency
    from deepinfer.engine.parts import EngineDrafter as EngineDrafter
    from deepinfer.engine.parts import EngineRunner as EngineRunner
    from deepinfer.engine.parts import EngineScheduler as EngineScheduler
    from deepinfer.engine.runner import ModelRunner as ModelRunner
    from deepinfer.engine.stats import EngineStats as EngineStats
    from deepinfer.engine.stop import OutputText as OutputText
    from deepinfer.engine.stop import StopChecker as StopChecker
    from deepinfer.engine.streaming import TokenStream as TokenStream
    from deepinfer.engine.tokenizer import Tokenizer as Tokenizer
    from deepinfer.engine.trace import Trace as Trace

_EXPORTS = {
    "AsyncEngine": "deepinfer.engine.async_engine",
    "AsyncTokenStream": "deepinfer.engine.async_engine",
    "ChatParser": "deepinfer.engine.chat_parser",
    "ChatPrompt": "deepinfer.engine.chat",
    "DRAFTERS": "deepinfer.engine.drafter",
    "DSparkDrafter": "deepinfer.engine.drafter",
    "Engine": "deepinfer.engine.engine",
    "EngineDrafter": "deepinfer.engine.parts",
    "EngineRunner": "deepinfer.engine.parts",
    "EngineScheduler": "deepinfer.engine.parts",
    "EngineStats": "deepinfer.engine.stats",
    "FutureTokens": "deepinfer.engine.future_tokens",
    "HostTier": "deepinfer.engine.host_tier",
    "IncrementalDetokenizer": "deepinfer.engine.detokenizer",
    "Latency": "deepinfer.engine.latency",
    "ModelRunner": "deepinfer.engine.runner",
    "OutputText": "deepinfer.engine.stop",
    "StopChecker": "deepinfer.engine.stop",
    "TokenStream": "deepinfer.engine.streaming",
    "Tokenizer": "deepinfer.engine.tokenizer",
    "Trace": "deepinfer.engine.trace",
    "encode_messages": "deepinfer.engine.chat",
    "parse_completion": "deepinfer.engine.chat_parser",
    "render_chat": "deepinfer.engine.chat",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
