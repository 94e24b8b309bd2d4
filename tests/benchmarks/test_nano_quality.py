"""`benchmarks/nano_quality.py`: its parts one by one, and a whole run on a tiny checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quality import answers, card, held_out, parts, recall, results, scoring
from quality.drafting import RecordingDrafter, draft_run
from quality.held_out import Document
from quality.metrics import Rate

from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.core.types import FinishReason, Output
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models import load_model

TEXT = '''"""Words and numbers for the tests."""


def double(number):
    """Returns twice the number that was given."""
    twice = number + number
    return twice


def shout(word):
    """Returns a word in capitals, with a mark behind it."""
    return word.upper() + "!"
'''
ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "src" / "deepinfer" / "assets" / "nano"
DOCUMENTS = [Document(f"{i}.py", f"{TEXT}\nNUMBER = {i}\n", "test") for i in range(10)]


# ---- held-out text --------------------------------------------------------------------------


def test_held_out_files_follow_the_names_of_the_training(tmp_path: Path) -> None:
    for number in range(45):
        (tmp_path / f"{number:02}.py").write_text(f"x = {number}\n")
    every = held_out.held_out_documents(tmp_path, (".py",), None)
    assert [document.name for document in every] == ["19.py", "39.py"]
    named = held_out.held_out_documents(tmp_path, (".py",), ["07.py", "03.py", "gone.py"])
    assert [document.name for document in named] == ["03.py", "07.py"]


def test_overlap_counts_long_lines_wherever_they_stand() -> None:
    common = "this line is long enough to count"
    documents = [
        Document("a", f"{common}\nshort\n    {common}\nand one more that nobody else has\n", ""),
        Document("b", "nothing here that anybody else would have written\n", ""),
        Document("c", "short\n", ""),
    ]
    found = held_out.overlaps(documents, ["x\n", f"y\n\t{common}\nshort\n"])
    assert [(o.found, o.lines, o.is_small) for o in found] == [
        (2, 3, False), (0, 1, True), (0, 0, True)
    ]  # fmt: skip


def test_training_text_comes_back_from_its_tokens(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoint)
    texts = ["def fib(n):\n    return 深度 🙂\n", "second"]
    code = [token for text in texts for token in [*tokenizer.encode(text), 1]]
    np.savez(tmp_path / "streams.npz", code=np.array(code, dtype=np.uint16), held_out_code=[5, 6])
    found = list(held_out.training_texts(tmp_path, tokenizer, chunk=3))
    assert found == ["\n" + "\n\n".join(texts) + "\n"]


# ---- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [4, 8])
@pytest.mark.parametrize("num_targets", [1, 4, 7, 8, 9, 12, 13, 40])
def test_windows_score_every_target_once(num_targets: int, stride: int) -> None:
    found = scoring.windows(num_targets, 8, stride)
    scored = [t for window in found for t in range(window.first, window.end)]
    assert scored == list(range(num_targets))
    assert all(w.end - w.start <= 8 and w.start <= w.first < w.end for w in found)
    if stride == 4:
        assert all(w.first - w.start == 4 for w in found[1:])


def test_costs_are_those_of_the_whole_sequence_pass(checkpoint: Path) -> None:
    model = load_model(checkpoint, rounding="none", progress=False)
    tokenizer = Tokenizer(checkpoint)
    rows = [tokenizer.encode(TEXT * 3), tokenizer.encode("def f(x): pass")]
    assert len(rows[0]) > scoring.CHUNK
    scorer = scoring.Scorer(model)
    for row, nats in zip(rows, scorer.score(rows), strict=True):
        logits = model.logits(row[:-1]).double().log_softmax(-1)
        exact = -logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        assert nats == pytest.approx(exact.numpy(), abs=1e-3)
    num_tokens = sum(len(row) - 1 for row in rows)
    assert (scorer.loads.sum(1) == 2 * num_tokens).all()


def test_a_text_is_put_together_from_its_windows(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [list(range(10)), list(range(100, 3200)), list(range(2049))]
    calls: list[list[int]] = []

    def score(folder: Path, rows: Any, **options: Any) -> scoring.Scores:
        calls.extend(rows)
        # a target costs its token, and a millionth of its place in the window
        made = [np.array([token + at / 1e6 for at, token in enumerate(row[1:])]) for row in rows]
        return scoring.Scores(made, np.ones((1, 1)))

    monkeypatch.setattr(scoring, "score_rows", score)
    costs = scoring.Costs(texts)
    costs.measure([(range(3), scoring.WINDOW), ([1], scoring.STRIDE)], checkpoint)
    assert [len(row) - 1 for row in calls] == [9, 2048, 2048, 1051, 2048]  # one is shared
    for number, text in enumerate(texts):
        assert np.floor(costs.nats(number)).tolist() == text[1:]
    places = np.round((costs.nats(1, scoring.STRIDE) % 1) * 1e6).astype(int)
    assert places.tolist() == [*range(2048), *range(1024, 2048), *range(1024, 1051)]


# ---- recall ---------------------------------------------------------------------------------


class CopyModel:
    """Predicts what followed the last occurrence of the newest `reach` tokens; else the image token."""

    config = SimpleNamespace(image_token_id=7)

    def __init__(self, reach: int, far: int = 10**6) -> None:
        self.reach, self.far = reach, far
        self.embed = SimpleNamespace(weight=torch.zeros(1))

    def new_cache(self, num_slots: int, *args: Any, **options: Any) -> Any:
        cache = SimpleNamespace(num_slots=num_slots, rows=[[] for _ in range(num_slots)])

        def truncate(slot: int, length: int) -> None:
            del cache.rows[slot][length:]

        cache.truncate = truncate
        return cache

    def __call__(self, batch: Any, cache: Any) -> Any:
        out, at = [], 0
        for segment in batch.segments:
            row = cache.rows[segment.slot]
            assert len(row) == segment.start
            for token in batch.input_ids[at : at + segment.num_tokens].tolist():
                assert token != self.config.image_token_id
                row.append(token)
                out.append(self._next(row))
            at += segment.num_tokens
        return SimpleNamespace(hidden=torch.tensor(out))

    def _next(self, row: list[int]) -> int:
        newest = row[-self.reach :]
        for at in range(len(row) - 1, max(self.reach, len(row) - self.far) - 1, -1):
            if row[at - self.reach : at] == newest:
                return row[at]
        return self.config.image_token_id

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden, 5000).float()


def test_recall_sees_who_copies_and_how_far() -> None:
    stream = [1 + i % 3 for i in range(3 * recall.ROW_TOKENS)]
    rows = recall.recall_rows(stream, range(10, 5000), 2)
    assert rows == recall.recall_rows(stream, range(10, 5000), 2)
    spans = [row[recall.BEFORE : recall.BEFORE + recall.SPAN] for row in rows]
    assert spans[0] != spans[1]
    assert all(len(row) == recall.ROW_TOKENS for row in rows)
    whole = recall.measure(CopyModel(4), rows)  # type: ignore[arg-type]
    assert set(whole) == set(recall.DISTANCES)
    assert all(r == recall.Recall(Rate(32, 32), Rate(2, 2)) for r in whole.values())
    near = recall.measure(CopyModel(4, far=300), rows)  # type: ignore[arg-type]
    assert {d for d, r in near.items() if r.tokens.value == 1.0} == {64, 128, 256}
    assert near[512] == recall.Recall(Rate(0, 32), Rate(0, 2))


# ---- drafts ---------------------------------------------------------------------------------


class FixedDrafter:
    draft_length = 3

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        count = len(view.rids)
        return DraftBatch(token_ids=((7, 8, 9),) * count, confidences=((0.9, 0.8, 0.7),) * count)


def test_recorded_blocks_are_compared_with_the_output() -> None:
    drafter = RecordingDrafter.__new__(RecordingDrafter)
    drafter._inner, drafter.blocks = FixedDrafter(), {}  # type: ignore[assignment]
    for position, max_drafts in ((2, 3), (5, 3), (6, 1)):
        view = DraftView(
            rids=("a",), slots=(0,), anchor_ids=(1,), positions=(position,), token_ids=((),)
        )
        batch = drafter.propose(view, max_drafts)
        assert batch.token_ids == ((7, 8, 9)[:max_drafts],)
    # prompt 1 2, first token 3 at position 2; block 1 gives 7 8 5, block 2 gives 6, block 3 gives 7, then 4 alone
    output = Output(rid="a", token_ids=(3, 7, 8, 5, 6, 7, 4))
    run = draft_run(drafter, [[1, 2]], [output])
    assert run.tokens == 6
    assert run.steps == 3 + 0
    assert [block.accepted for block in run.blocks] == [2, 0]
    undrafted = Output(rid="b", token_ids=(1, 2, 3))
    assert draft_run(drafter, [[1]], [undrafted]).steps == 2


# ---- answers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(checkpoint: Path) -> list[answers.Task]:
    return answers.TaskMaker(Tokenizer(checkpoint), DOCUMENTS).tasks()


def test_tasks_are_fixed_and_a_quick_run_takes_the_first(
    checkpoint: Path, tasks: list[answers.Task]
) -> None:
    again = answers.TaskMaker(Tokenizer(checkpoint), DOCUMENTS).tasks(limit=2)
    for kind in {task.kind for task in tasks}:
        ids = [task.prompt_ids for task in tasks if task.kind == kind]
        assert [task.prompt_ids for task in again if task.kind == kind] == ids[:2]
    assert len({task.prompt_ids for task in tasks if task.kind.startswith("sum")}) == 96


def test_right_answers_are_right_and_wrong_ones_wrong(
    checkpoint: Path, tasks: list[answers.Task]
) -> None:
    tokenizer = Tokenizer(checkpoint)
    by_kind: dict[str, answers.Task] = {}
    for task in tasks:
        by_kind.setdefault(task.kind, task)

    def asked(kind: str) -> str:
        return tokenizer.decode(by_kind[kind].prompt_ids)

    def judge(kind: str, text: str, reason: FinishReason = FinishReason.STOP) -> bool | None:
        return by_kind[kind].judge(Output(rid="x", text=text, finish_reason=reason))

    question = answers.re.search(r"\d+ [-+*] \d+", asked("sum of 2 digits"))
    assert question is not None
    value = eval(question[0])
    assert judge("sum of 2 digits", f"{question[0]} = {value}")
    assert not judge("sum of 2 digits", f"{question[0]} = {value + 1}")
    assert not judge("sum of 2 digits", f"{question[0]} = {value}", FinishReason.LENGTH)
    secret = answers.re.search(r"password of (\S+)\?", asked("password"))
    assert secret is not None
    told = answers.re.search(rf"password of {secret[1]} is (\S+)\.", asked("password"))
    assert told is not None
    assert judge("password", f"It is {told[1]}.")
    assert not judge("password", "It is swordfish.")
    assert judge("small talk", "Hello!") is None
    function = asked("held-out function")
    assert '"""' in function
    assert judge("held-out function", "\n    return word\n\n\n")
    assert not judge("held-out function", "\n    return (word\n")
    assert not judge("held-out function", "\n    return word", FinishReason.LENGTH)


def test_generated_documents_complete_themselves(checkpoint: Path) -> None:
    maker = answers.TaskMaker(Tokenizer(checkpoint), DOCUMENTS)
    written: list[str] = []
    write = maker.writer.json_document
    maker.writer.json_document = lambda: written.append(write()) or written[-1]  # type: ignore[method-assign,func-returns-value]
    task = next(maker.json_documents())
    rest = written[-1][int(answers.CUT * len(written[-1])) :]
    assert task.judge(Output(rid="x", text=rest, finish_reason=FinishReason.STOP))
    assert not task.judge(Output(rid="x", text=rest[:-1], finish_reason=FinishReason.STOP))


@pytest.mark.parametrize(
    ("text", "reason", "formed"),
    [
        ("four<｜end▁of▁sentence｜>", FinishReason.STOP, True),
        ("four", FinishReason.LENGTH, False),
        ("four", FinishReason.STOP, False),
        ("<｜end▁of▁sentence｜>", FinishReason.STOP, False),
        ("fo<｜User｜>ur<｜end▁of▁sentence｜>", FinishReason.STOP, False),
        ("four</think><｜end▁of▁sentence｜>", FinishReason.STOP, False),
    ],
)
def test_well_formed(checkpoint: Path, text: str, reason: FinishReason, formed: bool) -> None:
    tokenizer = Tokenizer(checkpoint)
    ids = tuple(tokenizer.encode(text, add_bos=False, allowed_special="all"))
    output = Output(rid="x", token_ids=ids, finish_reason=reason)
    assert answers.is_well_formed(output, tokenizer) is formed


def _with_files_of(checkpoint: Path, folder: Path) -> Path:
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


# ---- records and card -----------------------------------------------------------------------


def test_hash_follows_the_weights_and_not_the_card(checkpoint: Path, tmp_path: Path) -> None:
    _with_files_of(checkpoint, tmp_path)
    assert results.content_hash(tmp_path) == results.content_hash(checkpoint)
    for name in results.NO_CONTENT:
        (tmp_path / name).write_text("{}")
    assert results.content_hash(tmp_path) == results.content_hash(checkpoint)
    weights = next(tmp_path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert results.content_hash(tmp_path) != results.content_hash(checkpoint)


def test_newest_line_of_these_weights_counts(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for checkpoint, value, limit in (
        ("a", 1.0, None),
        ("a", 2.0, None),
        ("b", 3.0, None),
        ("a", 4.0, 5),
    ):
        results.Recorder(path, checkpoint, "m", "cpu", limit=limit).add("p", "c", value, "u")
    assert results.read_lines(path, "a")["p", "c"]["value"] == 2.0
    assert results.read_lines(tmp_path / "none", "a") == {}


def test_blocks_are_filled_and_unknown_ones_refused() -> None:
    text = "a\n<!-- table: x -->\nold\n<!-- end of table -->\nb\n"
    filled = card.fill(text, {"x": "new\n"})
    assert filled == "a\n<!-- table: x -->\nnew\n<!-- end of table -->\nb\n"
    assert card.fill(filled, {"x": "new\n"}) == filled
    with pytest.raises(KeyError):
        card.fill(text, {})


def test_percent_says_all_and_none_only_when_exact() -> None:
    assert [card.percent(v) for v in (0.0, 1e-5, 0.5, 0.99999, 1.0, None)] == [
        "0.0 %", "0.1 %", "50.0 %", "99.9 %", "100.0 %", "–"
    ]  # fmt: skip


def test_training_report_is_kept_without_paths(checkpoint: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "out", tmp_path / "kept"
    source.mkdir()
    folder.mkdir()
    report = {
        "options": {"data": "/somewhere/else/data", "steps": "9", "resume_trunk": "None"},
        "phases": {"trunk": {"seconds": 7.5, "steps": 9}},
        "log": [{"file": "/a/b"}, {"step": 8, "loss": 2.5}, {"draft_step": 3, "l1": 0.25}],
    }
    (source / "report.json").write_text(json.dumps(report))
    card.keep_report(source, folder)
    kept = json.loads((folder / "report.json").read_text())
    assert kept["options"] == {"data": "data", "steps": "9", "resume_trunk": "None"}
    assert kept["log"][0] == {"file": "b"}
    text = card.tables(_with_files_of(checkpoint, folder), tmp_path / "none")["training"]
    assert "| phase: trunk | seconds 7.5, steps 9 |" in text
    assert "| last line of the model's log | step 8, loss 2.5 |" in text
    assert "| options | steps 9 |" in text


# ---- the whole run --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the checkpoint with its card, and the lines that the card is made of."""
    folder = _with_files_of(checkpoint, tmp_path_factory.mktemp("measured"))
    lines = folder.parent / "lines.jsonl"
    recorder = results.Recorder(lines, results.content_hash(folder), folder.name, "cpu")
    bench = parts.Bench(
        folder, Tokenizer(folder), recorder, "cpu", 1, DOCUMENTS[:3], DOCUMENTS[3:4], limit=1
    )
    make = answers.TaskMaker.tasks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "local_training_texts", lambda docs: iter([TEXT]))
        patch.setattr(parts, "NEW_TOKENS", 16)
        patch.setattr(
            answers.TaskMaker,
            "tasks",
            lambda self, limit: [dataclasses.replace(t, max_tokens=12) for t in make(self, limit)],
        )
        parts.run_parts(bench, list(parts.PARTS))
    card.write(folder, lines)
    return folder, lines


def test_every_table_is_measured(measured: tuple[Path, Path]) -> None:
    folder, lines = measured
    for name, text in card.tables(folder, lines).items():
        assert card.NOT_MEASURED not in text, name
        if name not in ("overlap", "training"):
            assert text.startswith("| "), name


def test_card_says_what_the_lines_say(measured: tuple[Path, Path]) -> None:
    folder, path = measured
    text = (folder / "README.md").read_text("utf-8")
    lines = results.read_lines(path, results.content_hash(folder))
    assert results.content_hash(folder) in text
    bits = lines["bits per byte, code", "full"]
    assert f"| 3 | {bits['bytes']:,} | **{bits['value']:.3f}** |" in text
    whole = lines["recall, whole spans", "1024"]
    assert f"({whole['count']} of {whole['of']};" in text
    assert f"**{lines['draft, code', 'tokens a step']['value']:.2f}**" in text
    assert card.fill(text, card.tables(folder, path)) == text


def test_a_random_model_costs_what_guessing_costs(measured: tuple[Path, Path]) -> None:
    folder, path = measured
    lines = results.read_lines(path, results.content_hash(folder))
    bits = lines["bits per byte, code", "full"]
    guess = bits["tokens"] * math.log2(Tokenizer(folder).vocab_size) / bits["bytes"]
    assert guess < bits["value"] < 1.3 * guess
    assert lines["bits per byte, code", "none, few files"]["value"] == pytest.approx(
        bits["value"], rel=0.05
    )


def test_command_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import nano_quality

    ran: list[parts.Bench] = []
    monkeypatch.setattr(nano_quality, "run_parts", lambda bench, names: ran.append(bench))
    monkeypatch.setattr(
        sys, "argv", ["nano_quality.py", "--model", str(checkpoint), "--limit", "3"]
    )
    nano_quality.main()
    assert [len(bench.code) for bench in ran] == [3]
    assert ran[0].recorder.path is None
    assert not (checkpoint / "README.md").exists()


# ---- the repository -------------------------------------------------------------------------


@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="no embedded checkpoint here")
def test_card_of_the_embedded_checkpoint_is_current() -> None:
    text = (NANO / "README.md").read_text("utf-8")
    tables = card.tables(NANO, results.RESULTS)
    assert {name for _, name, *_ in card.BLOCK.findall(text)} == set(tables)
    assert card.fill(text, tables) == text, "run python benchmarks/nano_quality.py --card-only"


def test_template_shows_every_table(checkpoint: Path, tmp_path: Path) -> None:
    shown = {name for _, name, *_ in card.BLOCK.findall(card.TEMPLATE.read_text("utf-8"))}
    assert shown == set(card.tables(checkpoint, tmp_path / "none"))


def test_wheel_holds_everything_in_the_package() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    packed = {Path(file.path) for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    source = ROOT / "src" / "deepinfer"
    assert source / "py.typed" in packed
    assert {path for path in (source / "assets").rglob("*") if path.is_file()} <= packed
    sizes = [path.stat().st_size for path in NANO.glob("*.safetensors")]
    assert max(sizes, default=0) <= 12_000_000
    assert sum(sizes) <= 24_000_000
