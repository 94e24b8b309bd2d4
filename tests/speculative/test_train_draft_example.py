"""The example that attaches a draft to a model, at a size that trains in seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deepinfer.speculative import DraftModule, speculative_generate

TINY = (
    "--hidden 32 --layers 3 --steps 12 --batch 4 --context 32 --draft-steps 12 --rows 16 --anchors 4 --prompts 2 "
    "--tokens 12 --block 3 --temperatures 0 0.7"
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "train_draft.py"
    spec = importlib.util.spec_from_file_location("example_train_draft", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_it_runs_learns_and_outputs_are_identical(
    example: ModuleType, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    found = example.run([*TINY.split(), "--model", kind, "--out", str(tmp_path)])
    for name in ("target_losses", "draft_losses"):
        assert found[name][-1] < found[name][0]
    assert [row["drafter"] for row in found["report"]] == ["none", "ngram", "dspark"] * 2
    for row in found["report"]:
        assert row["identical"] == row["prompts"] == 2
        assert 1.0 <= row["accepted_length"] <= 4.0
    assert DraftModule.load(tmp_path).config.block_size == 3
    assert "2 of 2 outputs identical" in capsys.readouterr().out


def test_the_model_of_the_example_is_causal_and_its_cache_changes_nothing(
    example: ModuleType,
) -> None:
    torch.manual_seed(0)
    model = example.TinyModel(32, 3, 40).double()
    target = example.TorchTarget(model, (0, 1))
    ids = torch.randint(0, 256, (9,))
    whole = target.forward(ids)
    first = target.forward(ids[:4])
    wrong = target.forward(ids[:3], first.cache)
    rest = target.forward(ids[4:], target.crop(wrong.cache, 4), num_logits=2)
    torch.testing.assert_close(rest.logits, whole.logits[-2:])
    torch.testing.assert_close(rest.features, whole.features[4:])
    recorded = target.record(ids[None])
    torch.testing.assert_close(recorded.features[0], whole.features)
    torch.testing.assert_close(model.lm_head(recorded.final_hidden[0]), whole.logits)
    text = ids.tolist()
    for _ in range(5):
        states, _ = model(torch.tensor([text]))
        text.append(int(model.lm_head(states[-1][0, -1]).argmax()))
    assert list(speculative_generate(target, None, ids, 5).token_ids) == text[9:]
