"""Recorded and generated traffic: what simulators and benchmarks of balancers run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.balancers.traffic.generators import TrafficClass as TrafficClass
    from deepinfer.balancers.traffic.generators import generate_chat_trace as generate_chat_trace
    from deepinfer.balancers.traffic.generators import generate_herd as generate_herd
    from deepinfer.balancers.traffic.generators import generate_traffic as generate_traffic
    from deepinfer.balancers.traffic.loaders import load_azure_csv as load_azure_csv
    from deepinfer.balancers.traffic.loaders import load_bailian_jsonl as load_bailian_jsonl
    from deepinfer.balancers.traffic.loaders import load_burstgpt_csv as load_burstgpt_csv
    from deepinfer.balancers.traffic.loaders import load_lengths_csv as load_lengths_csv
    from deepinfer.balancers.traffic.loaders import load_mooncake_jsonl as load_mooncake_jsonl
    from deepinfer.balancers.traffic.records import TraceRecord as TraceRecord
    from deepinfer.balancers.traffic.records import TraceSummary as TraceSummary
    from deepinfer.balancers.traffic.records import summarize_trace as summarize_trace

_EXPORTS = {
    "TraceRecord": "deepinfer.balancers.traffic.records",
    "TraceSummary": "deepinfer.balancers.traffic.records",
    "TrafficClass": "deepinfer.balancers.traffic.generators",
    "generate_chat_trace": "deepinfer.balancers.traffic.generators",
    "generate_herd": "deepinfer.balancers.traffic.generators",
    "generate_traffic": "deepinfer.balancers.traffic.generators",
    "load_azure_csv": "deepinfer.balancers.traffic.loaders",
    "load_bailian_jsonl": "deepinfer.balancers.traffic.loaders",
    "load_burstgpt_csv": "deepinfer.balancers.traffic.loaders",
    "load_lengths_csv": "deepinfer.balancers.traffic.loaders",
    "load_mooncake_jsonl": "deepinfer.balancers.traffic.loaders",
    "summarize_trace": "deepinfer.balancers.traffic.records",
}

__all__ = [
    "TraceRecord",
    "TraceSummary",
    "TrafficClass",
    "generate_chat_trace",
    "generate_herd",
    "generate_traffic",
    "load_azure_csv",
    "load_bailian_jsonl",
    "load_burstgpt_csv",
    "load_lengths_csv",
    "load_mooncake_jsonl",
    "summarize_trace",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
