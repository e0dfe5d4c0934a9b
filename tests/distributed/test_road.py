"""The budget of a step's code path through the package, and its documentation."""

import json

import pytest

from tests import road
from tests.distributed.cluster import run_workers


@pytest.fixture(scope="module")
def roads():
    saved, _ = run_workers(road.walk, args=(list(road.CASES),))
    return json.loads(saved["roads"])


@pytest.mark.parametrize("name", road.CASES)
def test_code_path_is_within_budget(roads, name):
    *_, budget = road.CASES[name]
    files, functions, lines = found = road.size(roads[name])
    assert files > 10 and functions > 50 and lines > 300, "the profile is incomplete"
    assert all(f <= b for f, b in zip(found, budget, strict=True)), (found, budget)


def test_documentation_lists_code_path(roads):
    assert road.in_document(road.DOCUMENT.read_text()) == road.as_list(roads["TopK"]), (
        "update docs/archive/code-path.md: python -m tests.road --write"
    )
