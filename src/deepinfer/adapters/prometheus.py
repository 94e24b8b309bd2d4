"""The numbers of an engine for Prometheus.

Names, all with the prefix `deepinfer_`:

| name | type | meaning |
|---|---|---|
| num_requests_running, num_requests_waiting | gauge | requests with and without a slot |
| requests_added_total | counter | requests taken |
| request_success_total{finished_reason} | counter | requests ended, by "stop", "length", "abort", "error" |
| num_preemptions_total | counter | running requests that lost their slot |
| steps_total, failed_steps_total, graph_steps_total | counter | steps run, failed, replayed from a graph |
| prompt_tokens_total, generation_tokens_total, replayed_tokens_total | counter | prompt tokens run, output tokens, tokens run again after a prefix hit |
| spec_decode_num_draft_tokens_total, spec_decode_num_accepted_tokens_total | counter | drafts verified, drafts accepted |
| time_to_first_token_seconds, inter_token_latency_seconds, request_queue_time_seconds, e2e_request_latency_seconds, step_seconds | summary | quantiles 0.5 and 0.99 of the latest 4096, sum and count since the start |
| step_overhead_seconds_total, step_predicted_seconds_total, step_predicted_measured_seconds_total | counter | host time beside the model; predicted and measured time of predicted steps |
| kv_cache_usage_ratio | gauge | share of the cache that cannot be given out now |
| kv_cache_size_bytes, kv_cache_host_size_bytes | gauge | bytes on the device and in host memory |
| kv_cache_blocks{state} | gauge | blocks by "free", "idle", "held", "quarantined" |
| prefix_cache_queries_total | counter | tokens looked up |
| prefix_cache_hits_total{tier} | counter | of these, tokens found, by "device" and "host" |
| prefix_cache_reread_tokens_total | counter | tokens found by requests that had lost their slot; not among the hits |
| kv_cache_evicted_blocks_total, kv_cache_host_copies_total, kv_cache_host_copies_failed_total | counter | idle blocks given up, copies to and from the host |

A hit rate is `rate(prefix_cache_hits_total) / rate(prefix_cache_queries_total)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.core.lazy import optional_import
from deepinfer.engine.latency import Latency
from deepinfer.engine.stats import EngineStats

__all__ = ["EngineCollector", "MetricFamily", "metric_families", "render_metrics"]

Labels = tuple[tuple[str, str], ...]

_PREFIX = "deepinfer_"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric.

    Attributes:
        name: Its name.
        kind: "counter", "gauge" or "summary".
        help: What it means.
        samples: (suffix of the name, labels, value).
    """

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, float], ...]


def metric_families(stats: EngineStats) -> Iterator[MetricFamily]:
    """The metrics of an engine.

    Args:
        stats: What `Engine.stats` gave.

    Yields:
        One family a metric.
    """
    yield _one("num_requests_running", "gauge", "Requests that hold a slot", stats.requests_running)
    yield _one("num_requests_waiting", "gauge", "Requests without a slot", stats.requests_waiting)
    yield _one("requests_added_total", "counter", "Requests taken", stats.requests_added)
    yield _many(
        "request_success_total",
        "counter",
        "Requests ended",
        "finished_reason",
        {"stop": 0, "length": 0, "abort": 0, "error": 0, **stats.requests_finished},
    )
    for name, text, value in (
        ("num_preemptions_total", "Running requests that lost their slot", stats.preemptions),
        ("steps_total", "Steps run", stats.steps),
        ("failed_steps_total", "Steps that raised", stats.failed_steps),
        ("graph_steps_total", "Steps that replayed a captured graph", stats.graph_steps),
        ("prompt_tokens_total", "Prompt tokens run", stats.prefill_tokens),
        ("generation_tokens_total", "Tokens that became output", stats.generated_tokens),
        ("replayed_tokens_total", "Tokens run again after a prefix hit", stats.replayed_tokens),
        (
            "spec_decode_num_draft_tokens_total",
            "Draft tokens verified",
            stats.draft_tokens_verified,
        ),
        (
            "spec_decode_num_accepted_tokens_total",
            "Draft tokens accepted",
            stats.draft_tokens_accepted,
        ),
        ("step_overhead_seconds_total", "Host time beside the model", stats.overhead_seconds),
        (
            "step_predicted_seconds_total",
            "Predicted time of predicted steps",
            stats.predicted_seconds,
        ),
        (
            "step_predicted_measured_seconds_total",
            "Measured time of predicted steps",
            stats.predicted_measured_seconds,
        ),
    ):
        yield _one(name, "counter", text, value)
    for name, text, latency in (
        ("time_to_first_token_seconds", "Arrival to first token", stats.time_to_first_token),
        ("inter_token_latency_seconds", "Time between tokens", stats.inter_token),
        ("request_queue_time_seconds", "Arrival to first step", stats.queue),
        ("e2e_request_latency_seconds", "Arrival to end", stats.end_to_end),
        ("step_seconds", "Duration of a step", stats.step),
    ):
        yield _summary(name, text, latency)
    yield _one("kv_cache_usage_ratio", "gauge", "Used share of the cache", stats.kv_used_ratio)
    yield _one("kv_cache_size_bytes", "gauge", "Bytes of the cache", stats.kv_size_bytes)
    yield _one("kv_cache_host_size_bytes", "gauge", "Bytes in host memory", stats.host_size_bytes)
    if stats.cache is not None:
        yield from _cache_families(stats.cache)
    yield _one(
        "kv_cache_host_copies_total",
        "counter",
        "Copies between device and host",
        stats.host_copies,
    )
    yield _one(
        "kv_cache_host_copies_failed_total",
        "counter",
        "Copies that failed",
        stats.host_copies_failed,
    )


def render_metrics(stats: EngineStats, labels: Mapping[str, str] | None = None) -> str:
    """The metrics of an engine in the Prometheus text format 0.0.4.

    Args:
        stats: What `Engine.stats` gave.
        labels: Labels of every sample, such as the name of the model.

    Returns:
        The text, ready to be served as "text/plain; version=0.0.4".

    Examples:
        >>> text = render_metrics(EngineStats(steps=3), {"model": "nano"})
        >>> 'deepinfer_steps_total{model="nano"} 3' in text.splitlines()
        True
    """
    fixed = tuple((labels or {}).items())
    lines: list[str] = []
    for family in metric_families(stats):
        lines.append(f"# HELP {family.name} {family.help}.")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, own, value in family.samples:
            found = ",".join(f'{key}="{_escape(text)}"' for key, text in (*fixed, *own))
            lines.append(f"{family.name}{suffix}{f'{{{found}}}' if found else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


class EngineCollector:
    """Gives the metrics of an engine to `prometheus_client`: `REGISTRY.register(EngineCollector(engine))`.

    Args:
        engine: Has `stats()`.
        labels: Labels of every sample.

    Raises:
        MissingDependency: `prometheus_client` is not installed; `render_metrics` does without it.
    """

    def __init__(self, engine: Any, labels: Mapping[str, str] | None = None) -> None:
        self._core = optional_import("prometheus_client.metrics_core", package="prometheus-client")
        self._engine = engine
        self._labels = dict(labels or {})

    def describe(self) -> list[Any]:
        """Nothing: what there is to collect is found out when it is collected."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics.

        Yields:
            One `prometheus_client` metric a family.
        """
        for family in metric_families(self._engine.stats()):
            is_counter = family.kind == "counter"
            name = family.name.removesuffix("_total") if is_counter else family.name
            metric = self._core.Metric(name, family.help, family.kind)
            for suffix, own, value in family.samples:
                metric.add_sample(
                    f"{family.name}{suffix}", {**self._labels, **dict(own)}, float(value)
                )
            yield metric


def _cache_families(cache: Any) -> Iterator[MetricFamily]:
    states = {
        state: getattr(cache, f"{state}_blocks", 0)
        for state in ("free", "idle", "held", "quarantined")
    }
    yield _many("kv_cache_blocks", "gauge", "Cache blocks by state", "state", states)
    yield _one(
        "prefix_cache_queries_total",
        "counter",
        "Tokens looked up",
        getattr(cache, "queried_tokens_total", 0),
    )
    hits = {
        "device": getattr(cache, "hit_tokens_total", 0),
        "host": getattr(cache, "host_hit_tokens_total", 0),
    }
    yield _many("prefix_cache_hits_total", "counter", "Tokens found", "tier", hits)
    yield _one(
        "prefix_cache_reread_tokens_total",
        "counter",
        "Tokens found by requests that had lost their slot",
        getattr(cache, "reread_tokens_total", 0),
    )
    yield _one(
        "kv_cache_evicted_blocks_total",
        "counter",
        "Idle blocks given up",
        getattr(cache, "evicted_blocks_total", 0),
    )


def _one(name: str, kind: str, text: str, value: float) -> MetricFamily:
    return MetricFamily(_PREFIX + name, kind, text, (("", (), value),))


def _many(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> MetricFamily:
    samples = tuple(("", ((label, key),), value) for key, value in values.items())
    return MetricFamily(_PREFIX + name, kind, text, samples)


def _summary(name: str, text: str, latency: Latency) -> MetricFamily:
    quantiles = (("0.5", latency.p50_s), ("0.99", latency.p99_s))
    samples: list[tuple[str, Labels, float]] = [
        ("", (("quantile", q),), math.nan if value is None else value) for q, value in quantiles
    ]
    samples += [("_sum", (), latency.total_s), ("_count", (), latency.count)]
    return MetricFamily(_PREFIX + name, "summary", text, tuple(samples))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)
