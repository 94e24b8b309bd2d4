from __future__ import annotations

import pickle

import pytest

from deepinfer.core import errors

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", ALL, ids=lambda e: e.__name__)
def test_every_class_can_be_raised_with_a_message_alone(error: type[Exception]) -> None:
    with pytest.raises(errors.DeepInferError, match=r"^what happened$"):
        raise error("what happened")


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("m", field="a.b", value=3, limit="from 4"),
        errors.MissingDependency("m", package="p", extra="e", command="pip install p"),
        errors.UnsupportedHardware("m", needed="sm_90", found="cpu", fallback="cpu"),
        errors.ShapeError("m", argument="q", expected="[T, D]", found="[3]"),
        errors.CheckpointMissing("m", path="/nowhere"),
        errors.CheckpointMismatch("m", tensor="t", expected=(1, 2), found=(2, 1)),
        errors.HubOffline("m", repo="a/b", file="f"),
        errors.InvalidRequest("m", rid="r", field="f", value=1, limit="l"),
        errors.RequestTooLong("m", rid="r", limit_tokens=3, asked_tokens=4),
        errors.RequestAborted("m", rid="r"),
        errors.UnsupportedKeyword("m", path="/a", keyword="not"),
        errors.GrammarSyntaxError("m", line=1, column=2, position=1),
        errors.GrammarTooLarge("m", resource="states", limit=10, found=11),
        errors.BlockCorrupt("m", key=b"k"),
        errors.PeerLost("m", peer="p"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_attributes_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert vars(error)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.MissingDependency, ImportError),
        (errors.CheckpointMissing, FileNotFoundError),
        (errors.HubOffline, OSError),
        (errors.InvalidRequest, ValueError),
        (errors.ShapeError, ValueError),
        (errors.PeerLost, ConnectionError),
        (errors.TransferTimeout, TimeoutError),
        (errors.EngineDead, RuntimeError),
    ],
)
def test_builtin_handlers_catch(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


def test_module_docstring_draws_exactly_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, int] = {}
    for line in errors.__doc__.splitlines():
        name = line.lstrip("│├└─ ").partition("(")[0].split(" ")[0].strip()
        if name in errors.__all__:
            drawn[name] = len(line) - len(line.lstrip("│├└─ "))
    assert set(drawn) == set(errors.__all__)

    for name, depth in drawn.items():
        ancestors = [c for c in getattr(errors, name).__mro__ if c.__name__ in drawn]
        assert depth == 4 * (len(ancestors) - 1), name
