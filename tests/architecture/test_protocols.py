"""The parts that come with the package meet the protocols by which they can be replaced."""

from __future__ import annotations

import importlib
import inspect

import pytest

from deepinfer.core import protocols

PARTS = {
    "Balancer": ("deepinfer.balancers.replicas:ReplicaBalancer",),
    "CacheManager": (
        "deepinfer.cache.slots:SlotCacheManager",
        "deepinfer.cache.manager:BlockCacheManager",
    ),
    "Clock": ("deepinfer.core.clock:MonotonicClock", "deepinfer.core.clock:FakeClock"),
    "Drafter": ("deepinfer.engine.drafter:DSparkDrafter",),
    "Grammar": (),
    "GrammarState": (),
    "IncrementalDetokenizer": ("deepinfer.engine.detokenizer:IncrementalDetokenizer",),
    "LogitsProcessor": ("deepinfer.sampling.processors:AllowTokens",),
    "ModelRunner": ("deepinfer.engine.runner:ModelRunner",),
    "OutputSink": (),
    "Sampler": ("deepinfer.sampling.sampler:Sampler",),
    "Scheduler": ("deepinfer.scheduling.scheduler:Scheduler",),
    "StatsSink": ("deepinfer.core.events:NullSink", "deepinfer.core.events:MemorySink"),
    "StepHandle": (),
    "Tokenizer": (
        "deepinfer.engine.tokenizer:Tokenizer",
        "deepinfer.testing.toy_tokenizer:ToyTokenizer",
    ),
    "VerifyLengthPolicy": (),
}


def is_protocol(value: object) -> bool:
    return inspect.isclass(value) and getattr(value, "_is_protocol", False)


def test_every_protocol_is_listed_here() -> None:
    found = {name for name in protocols.__all__ if is_protocol(getattr(protocols, name))}
    assert found == set(PARTS)


@pytest.mark.parametrize(
    ("protocol", "part"), [(name, part) for name, parts in PARTS.items() for part in parts]
)
def test_part_has_the_methods_and_their_parameters(protocol: str, part: str) -> None:
    module, _, name = part.partition(":")
    implementation = getattr(importlib.import_module(module), name)
    for member, wanted in vars(getattr(protocols, protocol)).items():
        if member.startswith("_") and member != "__call__":
            continue
        found = inspect.getattr_static(implementation, member, None)
        if not inspect.isfunction(wanted):  # a property, or an attribute that __init__ sets
            assert found or f"self.{member}" in inspect.getsource(implementation), member
            continue
        assert found is not None, f"{name} lacks {member}"
        expected = list(inspect.signature(wanted).parameters.values())
        given = list(inspect.signature(found).parameters.values())
        names = [parameter.name for parameter in given]
        assert names[: len(expected)] == [parameter.name for parameter in expected], member
        for parameter in given[len(expected) :]:
            optional = parameter.default is not parameter.empty
            assert optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
