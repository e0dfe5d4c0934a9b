"""Wrappers leave to the method inside what they do not change themselves, whatever `Method` has."""

import inspect

import pytest

import tf_redsync as rs
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods.common.wrapper import OWN, MethodWrapper, hooks

# What each wrapper changes. All else must come from the method inside.
CHANGED = {
    MethodWrapper: set(OWN),
    rs.Coded: {*OWN, "state_kinds", "conserves", "describe", "init", "exchange"},
    rs.HalfPrecision: {
        *(*OWN, "state_kinds", "conserves", "totals_may_overflow", "dense", "describe"),
        *("init", "exchange"),
    },
}
TAKES_NONE = (MethodWrapper, rs.HalfPrecision)


def spy() -> rs.Method:
    """A method every hook of which answers with its own name and what it was asked with."""

    def answer(name, hook):
        if inspect.isfunction(hook):
            return lambda self, *args, **kwargs: (name, args, kwargs)
        return property(lambda self: name)

    own = {name: answer(name, hook) for name, hook in hooks().items() if name not in OWN}
    return type("Spy", (rs.TopK,), own)()


def test_hooks_are_all_that_is_public():
    assert {"sync_schedule", "ready", "point", "clip_norm", "exchange", "period"} < set(hooks())
    assert len(hooks()) >= 25


@pytest.mark.parametrize("wrapper", CHANGED, ids=lambda w: w.__name__)
def test_all_hooks_are_forwarded(wrapper):
    given = {"indices": rs.codings.RawIndices()} if wrapper is rs.Coded else {}
    wrapped = wrapper(method=spy(), **given)
    for name, hook in hooks().items():
        if name in CHANGED[wrapper]:
            continue
        found = getattr(wrapped, name)
        if inspect.isfunction(hook):
            assert found(1, key=2) == (name, (1,), {"key": 2})
        else:
            assert found == name


@pytest.mark.parametrize("wrapper", CHANGED, ids=lambda w: w.__name__)
def test_wrappers_define_what_they_change_and_nothing_else(wrapper):
    forwarding = vars(MethodWrapper)
    defined = {n for n in hooks() if inspect.getattr_static(wrapper, n) is not forwarding.get(n)}
    assert defined <= CHANGED[wrapper]


@pytest.mark.parametrize("wrapper", TAKES_NONE, ids=lambda w: w.__name__)
def test_without_a_method_inside_the_defaults_hold(wrapper):
    alone, plain = wrapper(), rs.Method()
    for name, hook in hooks().items():
        if name not in CHANGED[wrapper] and not inspect.isfunction(hook):
            assert getattr(alone, name) == getattr(plain, name)


def test_a_formula_for_the_bytes_of_the_method_inside_is_not_the_wrapper_s():
    layout = BucketLayout((TensorSpec("w", (100, 100)),), 2)
    assert rs.TopK().payloads(layout, 0) and rs.Coded().payloads(layout, 0) is None


def test_what_a_wrapper_sends_takes_no_second_form():
    inside = rs.TopK()
    assert inside.sends_selected and inside.rounds_values
    for wrapped in (rs.Coded(method=inside), rs.HalfPrecision(method=inside)):
        assert not wrapped.sends_selected and not wrapped.rounds_values
        for wrapper in (rs.Coded, rs.HalfPrecision):
            with pytest.raises(ValueError, match="`method` must"):
                wrapper(method=wrapped)


@pytest.mark.parametrize("wrapper", [rs.Coded, rs.HalfPrecision])
def test_what_is_no_method_is_refused(wrapper):
    with pytest.raises(ValueError, match="`method` must.*Received: method='top_k'"):
        wrapper(method="top_k")
