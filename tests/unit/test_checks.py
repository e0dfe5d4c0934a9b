"""Every error message names the argument and the value."""

import fractions

import numpy as np
import pytest

from tests.loops import loop
from tf_redsync import checks

FRACTION = fractions.Fraction(1, 2)  # a real number that JSON cannot represent


@pytest.mark.parametrize("value", [0.5, 1, 1.0, np.float32(0.25), np.int64(1)])
def test_real_inside_the_interval(value):
    checks.real("density", value, low=0.0, high=1.0, low_open=True)


@loop(
    "value", [0.0, -0.1, 1.0001, float("nan"), float("inf"), "0.5", None, True, 1j, [0.5], FRACTION]
)
def test_real_outside_the_interval(value):
    with pytest.raises(ValueError) as error:
        checks.real("density", value, low=0.0, high=1.0, low_open=True)
    assert "`density` must be in (0, 1]" in str(error.value)
    assert f"density={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("low_open", "high_open", "interval", "allowed"),
    [
        (False, False, "[0, 1]", (0, 1)),
        (True, False, "(0, 1]", (1,)),
        (False, True, "[0, 1)", (0,)),
        (True, True, "(0, 1)", ()),
    ],
)
def test_interval_endpoints(low_open, high_open, interval, allowed):
    def check(value):
        checks.real("x", value, low=0.0, high=1.0, low_open=low_open, high_open=high_open)

    for value in (0, 1):
        if value in allowed:
            check(value)
        else:
            with pytest.raises(ValueError) as error:
                check(value)
            assert interval in str(error.value)


def test_class_in_place_of_a_number_is_named():
    with pytest.raises(ValueError, match=r"`rate` must be in .*Fraction\(\.\.\.\)"):
        checks.real("rate", fractions.Fraction, low=0.0, high=1.0)


@pytest.mark.parametrize("value", [0.5, 3, np.float32(2.0)])
def test_positive(value):
    checks.positive("eta", value)
    for bad in (0.0, -value, float("inf"), float("nan"), "1"):
        with pytest.raises(ValueError, match=r"`eta` must be in \(0, inf\)"):
            checks.positive("eta", bad)


@pytest.mark.parametrize("value", [FRACTION, 1.0, 0, True, "1"])
def test_bad_steps_or_fraction(value):
    checks.steps_or_fraction("start", 0.5)
    checks.steps_or_fraction("start", np.int64(2))
    with pytest.raises(ValueError, match="`start` must be a number of steps"):
        checks.steps_or_fraction("start", value)


@pytest.mark.parametrize("value", [1, 5, np.int64(7)])
def test_integer_is_accepted(value):
    checks.integer("steps", value, low=1)


@pytest.mark.parametrize("value", [0, -3, 1.0, "2", None, True])
def test_non_integer_is_rejected(value):
    with pytest.raises(ValueError) as error:
        checks.integer("steps", value, low=1)
    assert f"`steps` must be an integer >= 1. Received: steps={value!r}" in str(error.value)


@pytest.mark.parametrize("value", ["Exact", "", None, ["exact"], 3])
def test_unknown_choice_is_rejected(value):
    checks.choice("selection", "exact", ("auto", "exact"))
    with pytest.raises(ValueError) as error:
        checks.choice("selection", value, ("auto", "exact"))
    assert "`selection`" in str(error.value) and f"selection={value!r}" in str(error.value)
    assert "'auto', 'exact'" in str(error.value)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "0.9"])
def test_momentum(value):
    checks.momentum(0.0, False)
    checks.momentum(0.99, True)
    with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\)"):
        checks.momentum(value, False)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match=r"nesterov=True.*momentum=0\.0"):
        checks.momentum(0.0, True)
