from __future__ import annotations

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.core.variables import VARIABLES, read_variable, variable_problems


def test_read() -> None:
    assert read_variable("DEEPINFER_ACCELERATOR", {}) is None
    assert read_variable("DEEPINFER_ACCELERATOR", {"DEEPINFER_ACCELERATOR": " CPU "}) == "cpu"
    folder = {"DEEPINFER_HF_MODEL_DIR": "/models/a"}
    assert read_variable("DEEPINFER_HF_MODEL_DIR", folder) == "/models/a"


@pytest.mark.parametrize("value", ["", "cuda", "nvidia,cpu"])
def test_malformed_values(value: str) -> None:
    with pytest.raises(ConfigError, match="DEEPINFER_ACCELERATOR"):
        read_variable("DEEPINFER_ACCELERATOR", {"DEEPINFER_ACCELERATOR": value})


def test_empty_path() -> None:
    with pytest.raises(ConfigError, match="Unset it"):
        read_variable("DEEPINFER_HF_MODEL_DIR", {"DEEPINFER_HF_MODEL_DIR": "  "})


def test_only_variables_of_the_table_can_be_read() -> None:
    with pytest.raises(ConfigError, match="did you mean 'DEEPINFER_ACCELERATOR'"):
        read_variable("DEEPINFER_ACELERATOR", {})


def test_problems_name_the_nearest_variable() -> None:
    assert variable_problems({"PATH": "x", "DEEPINFER_ACCELERATOR": "cpu"}) == []
    wrong = {"DEEPINFER_ACCELERATOR": "gpu", "DEEPINFER_HF_MODELDIR": "x", "DEEPINFER_QQ": ""}
    malformed, near, far = variable_problems(wrong)
    assert "'gpu'" in malformed
    assert "'nvidia', 'cpu', 'ascend'" in malformed
    assert near.endswith("Did you mean DEEPINFER_HF_MODEL_DIR?")
    assert far == "DEEPINFER_QQ is set and means nothing to deepinfer."


def test_table_is_complete_and_well_formed() -> None:
    names = [variable.name for variable in VARIABLES]
    assert names == sorted(set(names))
    for variable in VARIABLES:
        assert variable.name.startswith("DEEPINFER_")
        assert variable.doc.endswith(".")
        assert (variable.type == "choice") == bool(variable.choices)
