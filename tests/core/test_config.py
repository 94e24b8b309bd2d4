from __future__ import annotations

import enum
import json

import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError

BAD = {
    "deterministic": [1, None, "yes"],
    "max_num_seqs": [0, -1, 65_537, True, 1.0, None, float("nan")],
    "max_num_batched_tokens": [0, 15, 2**31, True, "64"],
    "prefill_chunk_tokens": [0, -1, True, 2.5],
    "max_model_len": [0, -5, True, 1.0],
    "block_size": [0, 65_537, False],
    "num_blocks": [0, -1, True, 2.5],
    "prefix_cache": [1, None, "yes"],
    "replay": ["exac", "", None, True],
    "decoder_replay": [0, None, "no"],
    "cuda_graphs": [1, None, "on"],
    "host_cache_bytes": [-1, 2**51, None, True],
    "num_window_slots": [-1, None, True],
    "target_step_s": [0, -1.0, float("nan"), True, "1"],
    "async_depth": [-1, 2, True],
    "rounding": ["ful", "", None, 1],
    "device": ["", None, 0, 1, True],
    "dtype": ["fp8", None, 16],
    "seed": [-1, 2**64, True, 0.5],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs])
def test_unusable_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(**{name: value})
    assert caught.value.field == name
    assert caught.value.limit


def test_every_field_has_bad_values_in_this_test() -> None:
    assert set(BAD) == set(EngineConfig.__dataclass_fields__)


def test_round_trip() -> None:
    config = EngineConfig(max_num_seqs=3, rounding="cache", seed=7)
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.replace(seed=8).seed == 8


def test_unknown_keys_name_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        EngineConfig.from_dict({"blocksize": 4})
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        EngineConfig().replace(max_seqs=4)
    with pytest.raises(ConfigError, match="mapping"):
        EngineConfig.from_dict("max_num_seqs=4")  # type: ignore[arg-type]


def test_near_miss_of_a_choice_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'full'"):
        EngineConfig(rounding="ful")


def test_string_enums_are_taken_by_value() -> None:
    class Level(str, enum.Enum):  # noqa: UP042 - `str()` of a member is not its value
        FULL = "full"
        CPU = "cpu"

    config = EngineConfig(rounding=Level.FULL, device=Level.CPU)
    assert (str(config.rounding), str(config.device)) == ("full", "cpu")


def test_torch_dtypes_and_devices_are_taken_by_name() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return self.name

    config = EngineConfig(dtype=Named("torch.bfloat16"), device=Named("cuda:1"))  # type: ignore[arg-type]
    assert (config.dtype, config.device) == ("bfloat16", "cuda:1")


def test_deterministic_engines_replay_exactly() -> None:
    assert EngineConfig().replay_form == "bounded"
    assert EngineConfig(deterministic=True).replay_form == "exact"
    assert EngineConfig(deterministic=True, replay="off").replay_form == "off"
