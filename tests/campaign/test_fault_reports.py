"""Faults that were reported of other serving engines: which test shows that this one does not have them.

The numbers are those of the project's list of reports; most tests are beside the part that could have the fault. What
needs several engines comes with the disaggregation of stages and is named as such.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deepinfer import Engine, SamplingParams
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

SCHEDULER = "tests/scheduling/test_reports.py::"
CACHE = "tests/cache/test_manager_faults.py::"
DEPTH = "tests/engine/test_engine_depth.py::"
PREFIX = "tests/engine/test_engine_prefix.py::"
HERE = "tests/campaign/test_fault_reports.py::"

TESTS = {
    "B1": DEPTH + "TestLedger::test_pressure_with_an_output_in_flight",
    "B2": SCHEDULER + "TestLedger::test_preempted_with_an_output_in_flight",
    "B3": DEPTH + "TestLedger::test_rows_that_miss_a_step",
    "B4": DEPTH + "TestLedger::test_long_prompt_beside_decoders",
    "B6": DEPTH + "TestLedger::test_reset_in_the_middle",
    "B7": DEPTH + "TestLedger::test_all_drafts_rejected_at_block_edges",
    "B8": DEPTH + "TestLedger::test_slot_given_to_another_at_once",
    "B9": SCHEDULER + "TestLedger::test_abort_between_launch_and_collect_of_a_chunk",
    "B10": SCHEDULER + "TestBlocks::test_what_can_never_fit_is_refused",
    "B11": SCHEDULER + "TestBlocks::test_two_long_prompts_do_not_hold_half_each",
    "B12": SCHEDULER + "TestBlocks::test_blocked_first_is_passed_a_few_times_and_then_served",
    "B14": DEPTH + "TestHost::test_processor_that_forces_two_tokens",
    "B15": DEPTH + "TestLedger::test_preempted_tokens_are_kept",
    "B17": PREFIX + "TestToy::test_block_borders_with_preemption",
    "B18": CACHE + "test_b18_equal_prompts_in_one_step_keep_their_own_pages",
    "B19": SCHEDULER + "TestBlocks::test_abort_at_every_phase",
    "B21": DEPTH + "TestHost::test_prompt_as_long_as_a_verify_row",
    "B22": DEPTH + "TestHost::test_masks_stay_with_their_rows_when_drafts_are_short",
    "B23": DEPTH + "TestHost::test_masks_stay_with_their_rows_when_drafts_are_short",
    "B24": DEPTH + "TestHost::test_grammar_after_preemption",
    "B25": HERE + "test_b25_seeds_beside_requests_without_one",
    "B26": HERE + "test_b26_preempted_seeded_request",
    "B27": HERE + "test_b27_steps_with_and_without_drafts_beside_it",
    "B28": HERE + "test_b28_equal_seeds_at_once",
    "B29": CACHE + "test_b29_the_check_walks_even_where_all_counters_agree",
    "B30": CACHE + "test_b30_only_settled_ids_are_published",
    "B32": CACHE + "test_b32_ending_a_prefill_at_any_length_frees_every_page_once",
    "B33": CACHE + "test_b33_cancels_and_retries_on_a_shared_page_leave_others_alone",
    "B35": CACHE + "test_b35_blocks_of_this_step_are_not_hits",
    "B36": CACHE + "test_b36_a_collision_is_a_miss",
    "B37": CACHE + "test_b37_windows_cost_no_blocks",
    "B38": "tests/models/deepseek_v41/test_replay.py::test_b38_cold_then_warm_in_the_same_slot",
    "B39": SCHEDULER + "TestBlocks::test_nobody_is_preempted_for_blocks_that_are_on_their_way",
    "B41": SCHEDULER + "TestBlocks::test_plan_that_is_never_run_costs_nothing",
    "B42": "tests/kernels/test_batch_invariant.py::test_norm_across_256_rows",
    "B43": PREFIX + "TestRealModel::test_deterministic_engines_are_warm_as_cold",
    "B46": PREFIX + "TestHostTier::test_failed_copies",
    "B48": "tests/engine/test_engine_misuse.py::test_a_request_that_is_ended_twice_ends_once",
    "B49": PREFIX + "TestHostTier::test_freed_host_blocks_hold_nothing_of_others",
    "B50": PREFIX + "TestHostTier::test_failed_copies",
    "B52": "tests/models/deepseek_v41/test_replay.py::test_b38_stale_rings_reach_nothing",
    "stop strings": "tests/engine/test_stop.py::test_one_character_at_a_time",
}
"""Test of each report that can happen to one engine; of B46 and B50, the host tier's part."""

SEVERAL_ENGINES = {"B45", "B53"}
"""Reports about hand-offs between engines, which do not exist yet."""

NEVER_GIVEN = {f"B{number}" for number in (5, 13, 16, 20, 31, 34, 40, 44, 47, 51)}
"""Numbers of the list that stand for no report."""


@pytest.mark.parametrize("report", sorted(TESTS))
def test_report_has_a_test(report: str, repo_root: Path) -> None:
    name, *path = TESTS[report].split("::")
    body = ast.parse((repo_root / name).read_text(encoding="utf-8")).body
    for part in path:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        ]
        assert len(found) == 1, f"{TESTS[report]} is gone"
        body = found[0].body


def test_every_report_is_accounted_for() -> None:
    numbers = {name for name in TESTS if name.startswith("B")} | SEVERAL_ENGINES | NEVER_GIVEN
    assert numbers == {f"B{number}" for number in range(1, 54)}


SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=8, ignore_eos=True)
FREE = SEEDED.replace(seed=None)
GREEDY = SEEDED.replace(temperature=0.0)


def tokens(params: list[SamplingParams], **parts: object) -> list[tuple[int, ...]]:
    model = ToyModel(ToyConfig(dspark_block_size=4))
    with Engine(model=model, tokenizer=ToyTokenizer(), config={"device": "cpu"}, **parts) as engine:
        return [output.token_ids for output in engine.generate(["abc"] * len(params), params)]


def test_b25_seeds_beside_requests_without_one() -> None:
    mixed = tokens([SEEDED, FREE] * 4)
    assert set(mixed[::2]) == set(tokens([SEEDED]))
    assert len(set(mixed[1::2])) == 4


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_b26_preempted_seeded_request(num_steps: int) -> None:
    (alone,) = tokens([SEEDED])
    with Engine(model=ToyModel(), tokenizer=ToyTokenizer(), config={"device": "cpu"}) as engine:
        rid = engine.add_request("abc", SEEDED, keep_output=True)
        for _ in range(num_steps):
            engine.step()
        engine.preempt(rid)
        while engine.has_unfinished:
            engine.step()
        assert engine.take_output(rid)[0].token_ids == alone


def test_b27_steps_with_and_without_drafts_beside_it() -> None:
    (alone,) = tokens([SEEDED])
    assert tokens([SEEDED, GREEDY, GREEDY], drafter="dspark")[0] == alone


def test_b28_equal_seeds_at_once() -> None:
    assert len(set(tokens([SEEDED] * 6))) == 1
