from __future__ import annotations

import re
import sys
import types

import pytest

from deepinfer import Engine, SamplingParams
from deepinfer.adapters import EngineCollector, metric_families, render_metrics
from deepinfer.adapters import prometheus as module
from deepinfer.core.errors import MissingDependency
from deepinfer.engine import EngineStats
from deepinfer.testing import ToyModel, ToyTokenizer

SAMPLE = re.compile(r'^(\w+)(\{\w+="[^"\\]*"(,\w+="[^"\\]*")*\})? (\S+)$')


def engine_after_work() -> Engine:
    engine = Engine(model=ToyModel(), tokenizer=ToyTokenizer())
    engine.generate(["abc", "de"], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    return engine


def test_text_has_a_type_and_well_formed_samples_for_every_metric() -> None:
    with engine_after_work() as engine:
        text = render_metrics(engine.stats(), {"model": "toy"})
    typed = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    helped = re.findall(r"^# HELP (\w+) ", text, re.MULTILINE)
    assert sorted(typed) == sorted(helped)
    values = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = SAMPLE.match(line)
        assert found, line
        name = re.sub(r"_(sum|count)$", "", found[1])
        assert name in typed or found[1] in typed
        values[found[1] + (found[2] or "")] = float(found[4])
    assert values['deepinfer_generation_tokens_total{model="toy"}'] == 12
    key = 'deepinfer_request_success_total{model="toy",finished_reason="length"}'
    assert values[key] == 2
    assert values['deepinfer_time_to_first_token_seconds_count{model="toy"}'] == 2
    assert values['deepinfer_inter_token_latency_seconds_count{model="toy"}'] == 10
    blocks = [v for k, v in values.items() if k.startswith("deepinfer_kv_cache_blocks")]
    with engine_after_work() as engine:
        assert sum(blocks) == engine.stats().cache.num_blocks


def test_names_are_those_of_the_documentation() -> None:
    documented = set()
    for row in re.findall(
        r"^\| (\w.*?) \| (?:gauge|counter|summary)", module.__doc__, re.MULTILINE
    ):
        documented |= {name.split("{")[0].strip() for name in row.split(",")}
    with engine_after_work() as engine:
        found = {f.name.removeprefix("deepinfer_") for f in metric_families(engine.stats())}
    assert found == documented


def test_labels_are_escaped() -> None:
    text = render_metrics(EngineStats(), {"model": 'a"b\\c\nd'})
    assert 'model="a\\"b\\\\c\\nd"' in text


def test_latency_without_samples_is_nan() -> None:
    assert 'deepinfer_step_seconds{quantile="0.5"} NaN' in render_metrics(EngineStats())


def test_collector_needs_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.metrics_core", None)
    with engine_after_work() as engine, pytest.raises(MissingDependency, match="prometheus"):
        EngineCollector(engine)


def test_collector_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metric:
        def __init__(self, name: str, documentation: str, typ: str) -> None:
            self.name, self.type, self.samples = name, typ, []

        def add_sample(self, name: str, labels: dict, value: float) -> None:
            self.samples.append((name, labels, value))

    core = types.ModuleType("prometheus_client.metrics_core")
    core.Metric = Metric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", types.ModuleType("prometheus_client"))
    monkeypatch.setitem(sys.modules, "prometheus_client.metrics_core", core)
    with engine_after_work() as engine:
        collector = EngineCollector(engine, {"model": "toy"})
        metrics = {metric.name: metric for metric in collector.collect()}
    tokens = metrics["deepinfer_generation_tokens"]  # the client adds the suffix of counters
    assert tokens.type == "counter"
    assert tokens.samples == [("deepinfer_generation_tokens_total", {"model": "toy"}, 12.0)]
    assert collector.describe() == []
