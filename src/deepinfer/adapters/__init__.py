"""Bridges to other software. Each needs what it bridges to only when it is used.

`render_metrics` writes the numbers of an engine as Prometheus text; `EngineCollector` gives them to
`prometheus_client`. `GrammarLogitsProcessor` keeps `transformers` in a grammar, `VllmGrammarBackend` vLLM, and
`SglangGrammarBackend` SGLang. `TransformersTarget` makes a model of `transformers` the target of a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.adapters.prometheus import EngineCollector as EngineCollector
    from deepinfer.adapters.prometheus import metric_families as metric_families
    from deepinfer.adapters.prometheus import render_metrics as render_metrics
    from deepinfer.adapters.sglang_grammar import SglangGrammar as SglangGrammar
    from deepinfer.adapters.sglang_grammar import SglangGrammarBackend as SglangGrammarBackend
    from deepinfer.adapters.sglang_grammar import register_with_sglang as register_with_sglang
    from deepinfer.adapters.transformers_draft import RecordedRows as RecordedRows
    from deepinfer.adapters.transformers_draft import TransformersTarget as TransformersTarget
    from deepinfer.adapters.transformers_grammar import (
        GrammarLogitsProcessor as GrammarLogitsProcessor,
    )
    from deepinfer.adapters.vllm_grammar import VllmGrammar as VllmGrammar
    from deepinfer.adapters.vllm_grammar import VllmGrammarBackend as VllmGrammarBackend

_EXPORTS = {
    "EngineCollector": "deepinfer.adapters.prometheus",
    "GrammarLogitsProcessor": "deepinfer.adapters.transformers_grammar",
    "SglangGrammar": "deepinfer.adapters.sglang_grammar",
    "SglangGrammarBackend": "deepinfer.adapters.sglang_grammar",
    "RecordedRows": "deepinfer.adapters.transformers_draft",
    "TransformersTarget": "deepinfer.adapters.transformers_draft",
    "VllmGrammar": "deepinfer.adapters.vllm_grammar",
    "VllmGrammarBackend": "deepinfer.adapters.vllm_grammar",
    "metric_families": "deepinfer.adapters.prometheus",
    "register_with_sglang": "deepinfer.adapters.sglang_grammar",
    "render_metrics": "deepinfer.adapters.prometheus",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
