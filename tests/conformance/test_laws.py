"""The laws, for every method of the table and several numbers of workers."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import SHAPES, SPECS, WORKERS, dense_payload
from tests.conformance.harness import (
    assert_equal_bits,
    copied,
    initial_states,
    make_grads,
    recorded,
    run,
    tensors,
)
from tests.conformance.table import TABLE, cases, counts_of, in_contrib, in_pairs, is_first
from tests.deep import DEEP
from tests.loops import loop
from tests.methods import METHODS
from tf_redsync.exchange import capabilities, driver, loopback
from tf_redsync.exchange.capabilities import at_step, capability
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather
from tf_redsync.methods.common.wrapper import MethodWrapper

PHASES = ("exchange", "dense_exchange")
MIDDLE = SHAPES.index((31, 5))


def every_phase(test):
    """Runs a test for each method, over phases and numbers of workers."""

    def phases(name):
        # two workers: test_oracles compares with the oracle
        counts = WORKERS if DEEP else (1, 3, 5)
        cases = [("exchange", workers) for workers in counts_of(name, counts)]
        if DEEP or has_new_dense_exchange(name):
            cases += [("dense_exchange", workers) for workers in ((1, 3) if DEEP else (3,))]
        return [{"phase": phase, "workers": workers} for phase, workers in cases]

    return for_each_method(phases, test)


def dense_kind(name) -> tuple:
    """The properties that a method's dense exchange depends on; not sizes and densities."""
    method = TABLE[name].method
    inner = getattr(method, "method", None)
    traits = ("momentum", "nesterov", "gathers", "served_only")
    found = [bool(getattr(m, t, False)) for m in (method, inner, TABLE[name]) for t in traits]
    return type(method), type(inner), *found, frozenset(method.traits.state_kinds)


_FIRST_DENSE = {dense_kind(name): name for name in reversed(TABLE)}


def has_new_dense_exchange(name) -> bool:
    """Whether no earlier entry has the same dense exchange."""
    return _FIRST_DENSE[dense_kind(name)] == name


def for_each_method(cases, test):
    """Runs a test for each method over `cases(name)`; an error names the case."""

    @pytest.mark.parametrize("name", TABLE)
    def run(name):
        for case in cases(name):
            try:
                test(name=name, **case)
            except Exception as error:
                error.add_note(f"{name}: {case}")
                raise

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def test_table_covers_every_public_method():
    assert len(METHODS) > 50
    missing = set(METHODS) - {type(d.method).__name__ for d in TABLE.values()}
    assert not missing, "add a `Descriptor` in tests/conformance/families/"


# ------------------------------------------------------------------------------ conservation


def conservation_error(record) -> tuple[float, float]:
    """Largest |sum(g + old residual) - total - sum(new residual)|, and the scale of its terms."""
    worst, scale = 0.0, 0.0
    for i in range(len(record.grads[0])):
        residuals = [
            sum(np.float64(s["residual"][i]) if "residual" in s else 0.0 for s in states)
            for states in (record.old_states, record.new_states)
        ]
        accumulated = sum(np.float64(g[i]) for g in record.grads) + residuals[0]
        delivered = np.float64(record.totals[0][i]) + residuals[1]
        if np.size(accumulated):
            worst = max(worst, float(np.abs(accumulated - delivered).max()))
            scale = max(scale, *(float(np.abs(g[i]).max()) for g in record.grads))
            scale = max(scale, float(np.abs(residuals[0]).max()))
    return worst, scale


@every_phase
def test_conservation(name, workers, phase):
    """sum(gradient + old residual) = total + sum(new residual), unless declared otherwise."""
    records = recorded(name, workers, phase)
    errors = [conservation_error(r) for r in records]
    if TABLE[name].method.traits.conserves:
        assert TABLE[name].method.traits.state_kinds.get("residual", "sum") == "sum"
        for worst, scale in errors:
            assert worst <= 1e-6 * workers * scale
    elif phase == "exchange" and workers > 1:
        # The declaration is needed: something is added (momentum) or dropped.
        assert max(worst / scale for worst, scale in errors) > 1e-3


# -------------------------------------------------------------------------- sending everything


def momentum_sgd(grads: list, method) -> list:
    """The totals of uncompressed SGD, in float64; `grads`: [step][worker][tensor]."""
    momentum, nesterov = getattr(method, "momentum", 0.0), getattr(method, "nesterov", False)
    velocity = [np.zeros(g.shape) for g in grads[0][0]]
    applied = []
    for step in grads:
        total = [sum(np.float64(g[i]) for g in step) for i in range(len(velocity))]
        if nesterov:
            velocity = [momentum * (u + g) for u, g in zip(velocity, total, strict=True)]
            applied.append([u + g for u, g in zip(velocity, total, strict=True)])
        else:
            velocity = [momentum * u + g for u, g in zip(velocity, total, strict=True)]
            applied.append(list(velocity))
        if getattr(method, "masks", False):  # everything is sent, so every velocity is cleared
            velocity = [np.zeros(u.shape) for u in velocity]
    return applied


@pytest.mark.parametrize("name", [n for n, d in TABLE.items() if d.full is not None])
def test_sending_everything_is_uncompressed_sgd(name):
    for workers in counts_of(name, WORKERS if DEEP else (1, 3)):
        check_everything_sent(TABLE[name], workers)


def check_everything_sent(descriptor, workers):
    tolerance = workers * max(2e-6, descriptor.tolerance)
    records = run(descriptor.full, workers, descriptor.specs)
    applied = momentum_sgd([r.grads for r in records], descriptor.full)
    for record, step in zip(records, applied, strict=True):
        for i, (total, expected) in enumerate(zip(record.totals[0], step, strict=True)):
            scale = max([1.0, *np.abs(expected).flat])
            np.testing.assert_allclose(total, expected, rtol=0, atol=tolerance * scale)
            kept = sum(np.float64(s["residual"][i]) for s in record.new_states if "residual" in s)
            if descriptor.gathers:
                assert not np.any(kept)
            np.testing.assert_allclose(kept, 0.0, rtol=0, atol=tolerance * scale)


# --------------------------------------------------------------------- agreement, determinism


@every_phase
def test_all_workers_get_same_bits(name, workers, phase):
    """Tests two or more workers."""
    for record in recorded(name, workers, phase):
        if TABLE[name].agrees or phase == "dense_exchange":
            for totals in record.totals[1:]:
                assert_equal_bits(totals, record.totals[0])
        elif workers > 1:
            distinct = {b"".join(t.tobytes() for t in totals) for totals in record.totals}
            assert len(distinct) > 1, "the method agrees on totals; declare `agrees`"


@pytest.mark.parametrize("name", [n for n in TABLE if DEEP or not in_contrib(n)])
def test_same_inputs_same_bits(name):
    """Repeats the first state, and the last step from the state before it."""
    descriptor, workers = TABLE[name], 3
    layout = BucketLayout(descriptor.specs, workers)
    first, *_, last = recorded(name, workers)
    initial = initial_states(descriptor.method, layout, descriptor.start)
    assert_equal_bits(copied(initial), first.old_states)
    grads, states = tensors(last.grads), tensors(last.old_states)
    again = loopback.run_step(descriptor.method, layout, grads, states, last.number)
    assert_equal_bits(copied(again.totals), last.totals)
    assert_equal_bits(copied(again.states), last.new_states)


@every_phase
def test_totals_and_states_keep_structure(name, workers, phase):
    method, layout = TABLE[name].method, BucketLayout(TABLE[name].specs, workers)
    shapes = [s.shape for s in layout.specs]
    initial = copied(method.init(layout))
    assert set(initial) == set(method.traits.state_kinds)
    assert set(method.traits.state_kinds.values()) <= {"sum", "mean", "shared"}
    for record in recorded(name, workers, phase):
        assert record.step.finite
        for totals, state in zip(record.totals, record.new_states, strict=True):
            assert [(t.shape, t.dtype) for t in totals] == [(s, np.float32) for s in shapes]
            tf.nest.assert_same_structure(state, initial)
            for new, old in zip(tf.nest.flatten(state), tf.nest.flatten(initial), strict=True):
                assert (new.shape, new.dtype) == (old.shape, old.dtype)
                assert np.isfinite(new).all()


def shared_state(name) -> list[str]:
    """The parts of a method's state that all workers share."""
    return [key for key, kind in TABLE[name].method.traits.state_kinds.items() if kind == "shared"]


@pytest.mark.parametrize("name", [name for name in TABLE if shared_state(name)])
def test_shared_state_is_equal_on_all_workers(name):
    for workers in counts_of(name):
        for record in recorded(name, workers):
            for key in shared_state(name):
                for state in record.new_states[1:]:
                    assert_equal_bits(state[key], record.new_states[0][key])


# ------------------------------------------------------------------------------ on the wire


# Bytes on the network per byte of payload, of ring collectives.
RING = {
    AllGather: lambda p: p - 1,
    AllReduce: lambda p: 2 * (p - 1) / p,
    AllToAll: lambda p: (p - 1) / p,
    PairGather: lambda p: min(1, p - 1),
}


def message_rows(request) -> np.ndarray:
    """The messages that a worker sends, `[messages, words]`."""
    words = np.asarray(request.messages if isinstance(request, AllToAll) else request.message)
    return words.reshape(-1, words.shape[-1])


@every_phase
def test_bytes_and_messages(name, workers, phase):
    """The declared requests, their bytes by the formula; word 0 is the finite flag."""
    descriptor = TABLE[name]
    specs = descriptor.specs
    for record in recorded(name, workers, phase):
        method = descriptor.method
        requests, expected = descriptor.kinds(workers), descriptor.payload
        if phase == "dense_exchange" and method.dense_exchange != method.exchange:
            requests, expected = (AllReduce,), dense_payload
        found = record.step.requests
        assert tuple(type(r) for r in found) == requests
        payloads = expected(method, specs, record.number)
        payloads = payloads(workers) if callable(payloads) else payloads
        payloads = [b(workers) if callable(b) else b for b in payloads]
        assert [int(driver.payload_bytes(r)) for r in found] == payloads
        sent = sum(RING[type(r)](workers) * b for r, b in zip(found, payloads, strict=True))
        assert record.step.bytes_sent == pytest.approx(sent)
        for request in found:
            if isinstance(request, (AllGather, AllToAll, PairGather)):
                rows = message_rows(request)
                assert rows.dtype == np.int32 and np.all(rows[:, 0] == 1)


def has_constant_size(method) -> bool:
    """Whether it sends the same amount from the first step on."""
    return not (method.traits.density_changes or method.sync_schedule.phases)


@loop("name, workers", cases([n for n, d in TABLE.items() if has_constant_size(d.method)], (3,)))
def test_formulas_and_periods(name, workers):
    """`payloads`, if a method has it, equals its requests, and repeats after `period`.

    With stages, this holds in each of them.
    """
    method = TABLE[name].method
    layout = BucketLayout(TABLE[name].specs, workers)
    records = recorded(name, workers)
    found = [[(type(q), int(driver.payload_bytes(q))) for q in r.step.requests] for r in records]
    for number, requests in enumerate(found):
        formula = method.payloads(layout, number)
        assert formula is None or formula == requests
        if TABLE[name].agrees:
            period, stage = method.traits.period, at_step(method, number)
            again = range(number % period, number + 1, period)
            assert requests == found[next(n for n in again if at_step(method, n) == stage)]


def test_period_is_minimal():
    first, second, third = (recorded("acp_sgd", 3)[i].step.bytes_sent for i in range(3))
    assert TABLE["acp_sgd"].method.traits.period == 2 and first == third != second


# ------------------------------------------------------------------- context of the exchange


def flagged(flag) -> list[str]:
    """The first entry of each method that declares a trait."""
    entries = [(n, d.method) for n, d in TABLE.items() if getattr(d.method.traits, flag)]
    return list({type(method): name for name, method in reversed(entries)}.values())


def coded(method):
    """A coding for any density."""
    return rs.Coded(method=method, indices=rs.codings.RawIndices(), values=rs.codings.Half())


def halved_values(method):
    return rs.HalfPrecision(method=method)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [(n, coded) for n in flagged("sends_selected")]
    + [(n, halved_values) for n in flagged("rounds_values")],
)
def test_wrappers_shorten_messages(name, wrap):
    """`sends_selected` and `rounds_values` promise to apply `ctx.coding` and `ctx.rounding`.

    The residual keeps the errors.
    """
    method = wrap(TABLE[name].method)
    (wrapped,) = run(method, 3, TABLE[name].specs, steps=1, start=TABLE[name].start)
    hint = "apply `ctx.coding` and `ctx.rounding`, as `deliver` does, or do not declare the trait"
    assert wrapped.step.bytes_sent < recorded(name, 3)[0].step.bytes_sent, hint
    worst, scale = conservation_error(wrapped)
    assert worst <= 3e-6 * scale or not method.traits.conserves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(MethodWrapper):
    """The wrapped method in a bucket whose gradients are scaled by 0.5."""

    def exchange(self, grads, state, ctx):
        ctx = dataclasses.replace(ctx, scale=tf.constant(0.5))
        return self.method.exchange(grads, state, ctx)

    def dense_exchange(self, grads, state, ctx):
        ctx = dataclasses.replace(ctx, scale=tf.constant(0.5))
        return self.method.dense_exchange(grads, state, ctx)


# After local steps, an exchange receives changes of weights, which no method clips.
SCALED = [n for n, d in TABLE.items() if is_first(n) and not d.method.sync_schedule.local_steps]


@pytest.mark.parametrize(
    ("name", "phase"),
    [(n, p) for n in SCALED for p in PHASES if p == PHASES[0] or has_new_dense_exchange(n)],
)
def test_scale_multiplies_gradients(name, phase):
    """`ctx.scale` of 0.5 gives the bits of halved gradients."""
    method, layout = TABLE[name].method, BucketLayout(TABLE[name].specs, 3)
    grads = make_grads(0, 3, [s.shape for s in layout.specs])
    halves = [[g * np.float32(0.5) for g in own] for own in grads]
    states = initial_states(method, layout, TABLE[name].start)
    expected = loopback.run_step(method, layout, tensors(halves), states, 0, phase)
    found = loopback.run_step(Clipped(method=method), layout, tensors(grads), states, 0, phase)
    hint = "multiply the gradients: feedback.scaled(grads, ctx.scale)"
    assert_equal_bits(copied(found.totals), copied(expected.totals), hint)
    assert_equal_bits(copied(found.states), copied(expected.states), hint)


# ------------------------------------------------------------------------------- not finite


def bad_values(name):
    """Cases of non-finite values: value, number of workers, which worker, tensor and phase.

    NaN at both ends, infinities of either sign, one worker alone; where pairs forward flags, as
    many workers as need more than one round.
    """
    if DEEP:
        counts = [(w, np.nan) for w in counts_of(name)] + [(2, np.inf), (2, -np.inf)]
        cases = [(*c, end, phase) for c in counts for phase in PHASES for end in (0, -1)]
    else:
        cases = [(3, np.nan, 0, PHASES[0]), (3, np.inf, -1, PHASES[0]), (3, -np.inf, 0, PHASES[0])]
        if has_new_dense_exchange(name):
            cases += [(3, np.nan, 0, PHASES[1]), (3, np.inf, -1, PHASES[1])]
        if is_first(name):
            cases += [(3, np.nan, -1, PHASES[0]), (1, np.nan, -1, PHASES[0])]
        if is_first(name) and in_pairs(name):
            cases += [(5, np.nan, end, PHASES[0]) for end in (0, -1)]
    return [dict(zip(("workers", "bad", "end", "phase"), case, strict=True)) for case in cases]


def every_bad_value(test):
    return for_each_method(bad_values, test)


@every_bad_value
def test_nonfinite_value_skips_step_on_all_workers(name, workers, bad, end, phase):
    descriptor = TABLE[name]
    layout = BucketLayout(descriptor.specs, workers)
    grads = make_grads(1, workers, [s.shape for s in layout.specs])
    grads[end][end].flat[-1:] = bad
    states = recorded(name, workers)[0].step.states
    old = copied(states)
    step = loopback.run_step(descriptor.method, layout, tensors(grads), states, 1, phase)
    if not descriptor.agrees and phase == "exchange":
        assert step.finite  # without communication no worker can know
        return
    assert not step.finite
    assert_equal_bits(copied(step.states), old, "a step that is not finite changed a state")
    if end == 0 and descriptor.gathers and phase == "exchange":
        first = next(r for r in step.requests if not isinstance(r, AllReduce))
        assert not message_rows(first).any(), "flag and payload must be 0"


@pytest.mark.deep  # other tests check that no state changes and that equal inputs give equal bits
@pytest.mark.parametrize("name", [n for n, d in TABLE.items() if d.agrees])
def test_nonfinite_step_leaves_no_trace(name):
    """Steps 0, non-finite, 2 give the bits of steps 0, 2 (with the step numbers 0 and 2)."""
    method, workers = TABLE[name].method, 2
    layout = BucketLayout(TABLE[name].specs, workers)

    def steps(numbers, bad):
        states = initial_states(method, layout, TABLE[name].start)
        for number in numbers:
            grads = make_grads(number, workers, [s.shape for s in layout.specs])
            if number == bad:
                grads[1][-1].flat[7] = np.nan
            outcome = loopback.run_step(method, layout, tensors(grads), states, number)
            assert outcome.finite == (number != bad)
            states = outcome.states
        return copied(outcome.totals), copied(outcome.states)

    assert_equal_bits(steps([0, 1, 2], bad=1), steps([0, 2], bad=None))


def test_cancelling_infinities_are_nonfinite():
    """+inf on one worker and -inf on another sum to NaN."""
    for name in ("dense", "redsync_exact"):
        grads = make_grads(0, 2)
        grads[0][MIDDLE].flat[0], grads[1][MIDDLE].flat[0] = np.inf, -np.inf
        method, layout = TABLE[name].method, BucketLayout(SPECS, 2)
        states = loopback.initial_states(method, layout)
        assert not loopback.run_step(method, layout, tensors(grads), states, 0).finite


@pytest.mark.parametrize("name", [name for name in TABLE if is_first(name)])
def test_overflowing_sum_is_nonfinite(name):
    """Each worker's value is a float32 but their sum overflows: no worker may apply it.

    A step checks totals only with `Traits.totals_may_overflow`.
    """
    method, layout = TABLE[name].method, BucketLayout(TABLE[name].specs, 2)
    grads = make_grads(0, 2, [s.shape for s in layout.specs])
    for own in grads:
        own[-1].flat[0] = 2.5e38
    states = initial_states(method, layout, TABLE[name].start)
    step = loopback.run_step(method, layout, tensors(grads), states, 0)
    if step.finite:
        finite = all(np.isfinite(t).all() for t in step.totals[0])
        assert finite, "declare `totals_may_overflow`"
    if name in ("dense", "redsync_auto"):
        assert not step.finite


# -------------------------------------------------------------------------------- interface


@loop("name", TABLE)
def test_config_round_trip(name):
    method = TABLE[name].method
    again = rs.methods.from_config(json.loads(json.dumps(rs.methods.serialize(method))))
    assert again == method and type(again) is type(method) and hash(again) == hash(method)
    assert again.get_config() == method.get_config()


def test_methods_are_frozen():
    for method in {type(d.method): d.method for d in TABLE.values()}.values():
        with pytest.raises(AttributeError):
            method.momentum = 0.5


@loop("name", TABLE)
def test_interface(name):
    method = TABLE[name].method
    fallback = method.dense()
    assert isinstance(fallback, rs.Method)
    for spec in SPECS:
        assert method.describe(spec)
        assert fallback.refuses(spec) is None
        assert method.refuses(spec) is None or isinstance(method.refuses(spec), str)
    assert fallback.traits.momentum_in_exchange == method.traits.momentum_in_exchange
    assert fallback.sync_schedule.local_steps == method.sync_schedule.local_steps
    assert fallback.sync_schedule.delay == method.sync_schedule.delay
    schedule = method.sync_schedule
    assert schedule.warm_up_steps >= 0
    for implied, kind in (
        (schedule.waits_for, capabilities.Waiting),
        (schedule.own_point, capabilities.EvaluationPoint),
        (schedule.fragments, capabilities.Fragmented),
        (schedule.stages, capabilities.Staged),
    ):
        assert bool(implied) == (capability(method, kind) is not None), kind
    assert bool(schedule.averages) == bool(schedule.average_every)
    assert {method.traits.state_kinds[name] for name in schedule.averages} <= {"mean"}
