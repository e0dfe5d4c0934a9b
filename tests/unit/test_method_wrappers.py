"""Wrappers forward all members of `Method` that they do not override."""

import dataclasses
import inspect

import pytest

import tf_redsync as rs
from tf_redsync.exchange import capabilities
from tf_redsync.exchange.capabilities import at_step, capability, clipping, dense_start
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods import Traits
from tf_redsync.methods.common.wrapper import MethodWrapper

MEMBERS = {name: m for name, m in vars(rs.Method).items() if not name.startswith("_")}
TRAITS = {field.name for field in dataclasses.fields(Traits)}

# Members and traits that each wrapper overrides; it forwards all others to the wrapped method.
OWN = {"paper", "requests", "bits", "sends_selected", "rounds_values", "payloads"}
CHANGED = {
    MethodWrapper: OWN,
    rs.Coded: OWN
    | {"state_kinds", "conserves", "totals_may_overflow", "describe", "init", "exchange"},
    rs.HalfPrecision: OWN
    | {"state_kinds", "conserves", "totals_may_overflow", "dense", "describe", "init", "exchange"},
}
TAKES_NONE = (MethodWrapper, rs.HalfPrecision)

OTHER = Traits(
    paper="its own",
    requests="its own",
    bits="its own",
    exchanges=False,
    state_kinds={"own": "mean"},
    period=3,
    rounds_values=True,
    finer_sums=2,
    votes=True,
    whole_model=True,
    conserves=False,
    dense_delivers=True,
    totals_may_overflow=False,
    waiting_steps=7.0,
    sends_selected=True,
    density_changes=True,
    needs_amsgrad=True,
    needs_sgd=True,
    momentum_in_exchange=0.5,
    notes=("its own",),
)


def spy() -> rs.Method:
    """Returns a method whose members return their own name and arguments."""

    def answer(name, member):
        if inspect.isfunction(member):
            return lambda self, *args, **kwargs: (name, args, kwargs)
        return property(lambda self: name)

    own = {name: answer(name, member) for name, member in MEMBERS.items() if name != "payloads"}
    return type("Spy", (rs.TopK,), {**own, "traits": OTHER})()


def wrapped_in(wrapper, method):
    given = {"indices": rs.codings.RawIndices()} if wrapper is rs.Coded else {}
    return wrapper(method=method, **given)


def test_spy_differs_from_the_defaults():
    assert all(getattr(OTHER, name) != getattr(Traits(), name) for name in TRAITS)


@pytest.mark.parametrize("wrapper", CHANGED, ids=lambda w: w.__name__)
def test_all_members_are_forwarded(wrapper):
    wrapped = wrapped_in(wrapper, spy())
    for name, member in MEMBERS.items():
        if name in CHANGED[wrapper] or name == "traits":
            continue
        found = getattr(wrapped, name)
        if not inspect.isfunction(member):
            assert found == name
        else:
            arguments = [object() for _ in list(inspect.signature(member).parameters)[1:]]
            assert found(*arguments) == (name, tuple(arguments), {})


@pytest.mark.parametrize("wrapper", CHANGED, ids=lambda w: w.__name__)
def test_all_traits_are_forwarded(wrapper):
    found = wrapped_in(wrapper, spy()).traits
    for name in TRAITS - CHANGED[wrapper]:
        assert getattr(found, name) == getattr(OTHER, name), name


@pytest.mark.parametrize("wrapper", CHANGED, ids=lambda w: w.__name__)
def test_wrappers_define_only_their_overrides(wrapper):
    forwarding = vars(MethodWrapper)
    defined = {n for n in MEMBERS if inspect.getattr_static(wrapper, n) is not forwarding.get(n)}
    assert defined <= CHANGED[wrapper] | {"traits"}


@pytest.mark.parametrize("wrapper", TAKES_NONE, ids=lambda w: w.__name__)
def test_without_a_wrapped_method_the_defaults_apply(wrapper):
    alone, plain = wrapper(), rs.Method()
    assert alone.sync_schedule == plain.sync_schedule
    for name in TRAITS - CHANGED[wrapper]:
        assert getattr(alone.traits, name) == getattr(plain.traits, name)
    assert clipping(alone) is None and at_step(alone, 3) is alone


def test_capabilities_of_the_wrapped_method_are_found():
    clips = rs.RedSync(clip_norm=2.0)
    for wrapped in (rs.Coded(method=clips), rs.HalfPrecision(method=clips)):
        assert capability(wrapped, capabilities.Clipping) is clips is clipping(wrapped)
        assert capability(wrapped, capabilities.EvaluationPoint) is None
    moved = rs.contrib.GMCPlus()
    scheduled = rs.Scheduled(method=rs.Coded(method=moved))
    assert capability(scheduled, capabilities.EvaluationPoint) is scheduled.method.method
    assert capability(scheduled, capabilities.Staged) is scheduled
    begins = rs.contrib.PostLocalSGD(start=5)
    assert dense_start(rs.HalfPrecision(method=begins)) == rs.DenseWarmUp(steps=5)


def test_wrapper_has_the_stages_of_the_wrapped_method():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Halved(capabilities.Staged, rs.TopK):
        def at(self, step):
            return self if step < 3 else dataclasses.replace(self, density=self.density / 2)

    wrapped = rs.HalfPrecision(method=Halved(density=0.5), dtype="bfloat16")
    assert at_step(wrapped, 2) is wrapped
    assert at_step(wrapped, 3) == dataclasses.replace(wrapped, method=Halved(density=0.25))


def test_byte_formula_of_the_wrapped_method_is_not_inherited():
    layout = BucketLayout((TensorSpec("w", (100, 100)),), 2)
    assert rs.TopK().payloads(layout, 0) and rs.Coded().payloads(layout, 0) is None


def test_wrappers_cannot_be_nested():
    inside = rs.TopK()
    assert inside.traits.sends_selected and inside.traits.rounds_values
    for wrapped in (rs.Coded(method=inside), rs.HalfPrecision(method=inside)):
        assert not wrapped.traits.sends_selected and not wrapped.traits.rounds_values
        for wrapper in (rs.Coded, rs.HalfPrecision):
            with pytest.raises(ValueError, match="`method` must"):
                wrapper(method=wrapped)


@pytest.mark.parametrize("wrapper", [rs.Coded, rs.HalfPrecision])
def test_non_method_is_rejected(wrapper):
    with pytest.raises(ValueError, match="`method` must.*Received: method='top_k'"):
        wrapper(method="top_k")
