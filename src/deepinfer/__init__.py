"""deepinfer: the inference stack of DeepSeek-V4.1-Flash as composable modules.

Each part works alone (`deepinfer.scheduling`, `deepinfer.cache`, `deepinfer.sampling`, ...); `Engine` wires them.
Importing this package loads neither torch nor any part; names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.core import errors as errors
    from deepinfer.core.config import EngineConfig as EngineConfig
    from deepinfer.core.params import SamplingParams as SamplingParams
    from deepinfer.core.types import Output as Output
    from deepinfer.core.types import Request as Request
    from deepinfer.engine.async_engine import AsyncEngine as AsyncEngine
    from deepinfer.engine.engine import Engine as Engine

__version__ = "0.1.0"

_EXPORTS = {
    "AsyncEngine": "deepinfer.engine.async_engine",
    "Engine": "deepinfer.engine.engine",
    "EngineConfig": "deepinfer.core.config",
    "Output": "deepinfer.core.types",
    "Request": "deepinfer.core.types",
    "SamplingParams": "deepinfer.core.params",
    "errors": "deepinfer.core.errors:",
}

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "Output",
    "Request",
    "SamplingParams",
    "__version__",
    "errors",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
