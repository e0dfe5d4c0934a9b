"""The budget of the road that a step takes through the package, and its documentation."""

import json

import pytest

from tests import road
from tests.distributed.cluster import run_workers


@pytest.fixture(scope="module")
def roads():
    saved, _ = run_workers(road.walk, args=(list(road.CASES),))
    return json.loads(saved["roads"])


@pytest.mark.parametrize("name", road.CASES)
def test_the_road_is_short(roads, name):
    *_, budget = road.CASES[name]
    files, functions, lines = found = road.size(roads[name])
    assert files > 10 and functions > 50 and lines > 300, "the profile saw too little"
    assert all(f <= b for f, b in zip(found, budget, strict=True)), (found, budget)


def test_the_documentation_lists_the_road(roads):
    assert road.in_document(road.DOCUMENT.read_text()) == road.as_list(roads["TopK"]), (
        "bring docs/architecture.md up to date: python -m tests.road --write"
    )
