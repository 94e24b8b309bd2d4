"""Bridges to other software. Each needs what it bridges to only when it is used.

`render_metrics` writes the numbers of an engine as Prometheus text; `EngineCollector` gives them to
`prometheus_client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.adapters.prometheus import EngineCollector as EngineCollector
    from deepinfer.adapters.prometheus import metric_families as metric_families
    from deepinfer.adapters.prometheus import render_metrics as render_metrics

_EXPORTS = {
    "EngineCollector": "deepinfer.adapters.prometheus",
    "metric_families": "deepinfer.adapters.prometheus",
    "render_metrics": "deepinfer.adapters.prometheus",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
