"""The JSON-Schema-Test-Suite, where it is at hand: no wrong verdict, and never fewer right ones than before."""

from __future__ import annotations

import json

import pytest
from tests.grammar.json_schema.suite import DRAFTS, RATCHET, run

# A long compilation here or there is a matter of the machine, so the totals get a little slack and no file does.
GOALS = {"draft2020-12": 2050, "draft7": 1540}


@pytest.mark.parametrize("folder", DRAFTS)
def test_suite(shared_data, folder):
    suite = shared_data / "json_schema_test_suite"
    if not suite.is_dir():
        pytest.skip("the JSON-Schema-Test-Suite is not at hand")
    counts, wrong = run(suite, folder)
    assert wrong == []
    before = json.loads(RATCHET.read_text("utf-8"))[folder]
    worse = {
        name: (counts[name], want)
        for name, want in before.items()
        if name in counts and counts[name].get("passed", 0) < want.get("passed", 0)
    }
    assert worse == {}
    assert sum(count.get("passed", 0) for count in counts.values()) >= GOALS[folder]


def test_ratchet_is_complete():
    ratchet = json.loads(RATCHET.read_text("utf-8"))
    assert {
        folder: sum(c.get("passed", 0) for c in files.values()) >= GOALS[folder]
        for folder, files in ratchet.items()
    } == {
        "draft2020-12": True,
        "draft7": True,
    }
