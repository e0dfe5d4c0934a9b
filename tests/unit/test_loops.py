"""`tests.loops.loop` runs every case and reports every failing one."""

import pytest

from tests.loops import loop

SEEN = []


@loop("a", (1, 2))
@loop("b, c", [(3, 4), (5, 6)])
def test_all_cases_run_with_fixtures(a, b, c, tmp_path):
    SEEN.append((a, b, c))
    assert tmp_path.is_dir()


def test_every_case_ran():
    assert SEEN == [(1, 3, 4), (1, 5, 6), (2, 3, 4), (2, 5, 6)]


def test_all_failing_cases_are_named():
    @loop("number", range(10))
    def fails(number):
        if number == 8:
            pytest.skip("nothing is skipped in silence")
        assert number < 3

    with pytest.raises(pytest.fail.Exception) as error:
        fails()
    text = str(error.value)
    assert "7 of 10 cases" in text and "assert 3 < 3" in text
    assert all(f"{{'number': {i}}}" in text for i in range(3, 10))
    with pytest.raises(AssertionError, match="at least one case"):
        loop("number", [])
