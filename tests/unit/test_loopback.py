"""The loopback answers requests and detects workers that diverge."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather
from tf_redsync.exchange.traits import Traits

LAYOUT = BucketLayout((TensorSpec("v", (2,)),), 3)


@dataclasses.dataclass
class Scripted:
    """A method whose worker r runs `script(r, grads)`."""

    script: object

    traits = Traits(totals_may_overflow=False, state_kinds={"seen": "sum"})

    def init(self, layout):
        return {"seen": [tf.zeros([2])]}

    def exchange(self, grads, state, ctx):
        return self.script(int(grads[0][0]), grads)


def run(script):
    method = Scripted(script)
    grads = [[tf.constant([float(rank), 10.0 * rank])] for rank in range(3)]
    return loopback.run_step(method, LAYOUT, grads, loopback.initial_states(method, LAYOUT), 0)


def test_gather_reduce_and_all_to_all():
    seen = []

    def script(rank, grads):
        gathered = yield AllGather(tf.constant([1, rank]))
        (total,) = yield AllReduce(grads)
        swapped = yield AllToAll(tf.constant([[1, 10 * rank + to] for to in range(3)]))
        seen.append((gathered, swapped))
        return [total], {"seen": [total + rank]}

    step = run(script)
    for rank in range(3):
        np.testing.assert_array_equal(step.totals[rank][0], [3.0, 30.0])
        np.testing.assert_array_equal(step.states[rank]["seen"], [[3.0 + rank, 30.0 + rank]])
        gathered, swapped = seen[rank]
        np.testing.assert_array_equal(gathered, [[1, 0], [1, 1], [1, 2]])
        np.testing.assert_array_equal(swapped[:, 1], [rank, 10 + rank, 20 + rank])
    assert [type(r) for r in step.requests] == [AllGather, AllReduce, AllToAll]
    assert step.bytes_sent == pytest.approx(8 * 2 + 8 * 4 / 3 + 24 * 2 / 3)
    assert step.finite


def test_nonfinite_step_keeps_the_states():
    def script(rank, grads):
        yield AllGather(tf.constant([0 if rank == 1 else 1, 0]))
        return grads, {"seen": grads}

    step = run(script)
    assert not step.finite
    assert not np.any([state["seen"] for state in step.states])


def different_lengths(rank, grads):
    yield AllGather(tf.ones([3 + rank], tf.int32))


def different_requests(rank, grads):
    yield AllReduce(grads) if rank else AllGather(tf.constant([1, 2]))


def different_dtypes(rank, grads):
    yield AllReduce([tf.cast(grads[0], tf.float64 if rank else tf.float32)])


def different_rounds(rank, grads):
    yield AllReduce(grads)
    if rank == 2:
        yield AllReduce(grads)
    return grads, {"seen": grads}


@pytest.mark.parametrize(
    "script", [different_lengths, different_requests, different_dtypes, different_rounds]
)
def test_diverging_workers_are_detected(script):
    with pytest.raises(ValueError, match="workers"):
        run(script)


def float_message(rank, grads):
    yield AllGather(grads[0])


def no_generator(rank, grads):
    return grads, {}


def returning(change):
    """A script that returns `change(total, state)`."""

    def script(rank, grads):
        yield AllReduce(grads)
        return change(grads[0], {"seen": [grads[0]]})

    return script


@loop(
    ("script", "error", "named"),
    [
        (float_message, TypeError, "int32.*float32"),
        (no_generator, TypeError, "yield from"),
        (returning(lambda t, s: None), TypeError, "pair.*NoneType"),
        (returning(lambda t, s: [t]), TypeError, "pair.*float32"),
        (returning(lambda t, s: ([t], [t])), TypeError, "pair.*float32"),
        (returning(lambda t, s: (t, s)), ValueError, "totals .*Received: float32"),
        (returning(lambda t, s: ([], s)), ValueError, r"totals .*Received: \[\]"),
        (returning(lambda t, s: ([t[0]], s)), ValueError, r"totals\[0\].*'v'.*\(2,\).*\(\)"),
        (returning(lambda t, s: ([t[tf.newaxis]], s)), ValueError, r"totals\[0\].*\(1, 2\)"),
        (returning(lambda t, s: ([tf.cast(t, tf.int32)], s)), ValueError, "float32.*int32"),
        (returning(lambda t, s: ([[0.0, 1.0]], s)), ValueError, "float32.*float"),
        (returning(lambda t, s: ([t], {})), ValueError, r"'seen'.*Received: \[\]"),
        (returning(lambda t, s: ([t], {**s, "u": [t]})), ValueError, "Received: .*'u'"),
        (returning(lambda t, s: ([t], {"seen": t})), ValueError, "'seen'.*Received: float32"),
        (returning(lambda t, s: ([t], {"seen": [t, t]})), ValueError, "'seen'.*, float32"),
        (returning(lambda t, s: ([t], {"seen": [t[0]]})), ValueError, r"'seen'.*\(2,\).*\(\)"),
        (
            returning(lambda t, s: ([t], {"seen": [tf.cast(t, tf.float64)]})),
            ValueError,
            "'seen'.*float32.*float64",
        ),
    ],
)
def test_mistakes_in_an_exchange_are_named(script, error, named):
    with pytest.raises(error, match=f"Scripted must .*{named}"):
        run(script)


def test_state_may_be_changed_in_place():
    class InPlace(rs.TopK):
        def exchange(self, grads, state, ctx):
            totals, new = yield from super().exchange(grads, dict(state), ctx)
            for n, values in new.items():
                state[n][:] = values
            return totals, state

    grads = [[tf.constant([1.0, 2.0])]] * 3
    states = loopback.initial_states(InPlace(density=0.5), LAYOUT)
    for method in (InPlace(density=0.5), rs.TopK(density=0.5)):
        step = loopback.traced_step(method, LAYOUT)(grads, states, 0)
        np.testing.assert_array_equal(step.states[0]["residual"], [[1.0, 0.0]])


def test_number_of_gradients_must_match_states():
    method = Scripted(different_lengths)
    with pytest.raises(ValueError, match="zip"):
        loopback.run_step(method, LAYOUT, [[tf.zeros([2])]], [{}, {}], 0)


@dataclasses.dataclass(frozen=True)
class Rotating:
    """Sends the step number around a ring; a worker with a negative gradient is not finite."""

    traits = Traits(state_kinds={"sent": "shared"})

    def init(self, layout):
        return {"sent": [tf.constant(-1, tf.int64)]}

    def exchange(self, grads, state, ctx):
        flag = tf.cast(grads[0][0] >= 0, tf.int32)
        rows = yield AllToAll(
            tf.stack([[flag, tf.cast(ctx.step, tf.int32) + to] for to in range(3)])
        )
        (total,) = yield AllReduce(grads)
        yield AllGather(tf.stack([flag, tf.size(rows)]))
        return [total + tf.cast(rows[0, 1], tf.float32)], {"sent": [ctx.step]}

    def dense_exchange(self, grads, state, ctx):
        (total,) = yield AllReduce(grads)
        return [total], state


@pytest.mark.parametrize("phase", ["exchange", "dense_exchange"])
def test_traced_step_equals_eager_step(phase):
    method = Rotating()
    run = loopback.traced_step(method, LAYOUT, phase)
    states = again = loopback.initial_states(method, LAYOUT)
    for number, values in enumerate([(0, 1, 2), (3, -4, 5), (6, 7, 8), (3e38, 3e38, 0)]):
        grads = [[tf.fill([2], float(v))] for v in values]
        one = loopback.run_step(method, LAYOUT, grads, states, number, phase)
        two = run(grads, again, number)
        bad = (1, 3) if phase == "exchange" else (3,)
        assert one.finite == two.finite == (number not in bad)
        for a, b in ((one.totals, two.totals), (one.states, two.states)):
            tf.nest.assert_same_structure(a, b)
            np.testing.assert_array_equal(tf.nest.flatten(a), tf.nest.flatten(b))
        assert one.bytes_sent == two.bytes_sent
        assert [type(r) for r in one.requests] == [type(r) for r in two.requests]
        for a, b in zip(one.requests, two.requests, strict=True):
            for x, y in zip(tf.nest.flatten(vars(a)), tf.nest.flatten(vars(b)), strict=True):
                np.testing.assert_array_equal(x, y)
        states, again = one.states, two.states
    if phase == "exchange":
        assert [int(s["sent"][0]) for s in again] == [2] * 3


@loop(
    ("method", "kinds"),
    [
        (rs.TopK(density=0.1, dense_below=1), {"AllGather"}),
        (rs.QSGD(dense_below=1), {"AllGather"}),
        (rs.contrib.OneBitSGD(dense_below=1), {"AllToAll", "AllGather"}),
        (rs.contrib.GTopK(density=0.1, dense_below=1), {"PairGather"}),
    ],
)
def test_flipped_bit_on_any_link_is_detected(method, kinds):
    """In every round the receiving worker detects it and names the sender."""
    layout = BucketLayout((TensorSpec("w", (30, 4)),), 3)
    grads = [[tf.random.stateless_normal([30, 4], [rank, 7])] for rank in range(3)]
    states = loopback.initial_states(method, layout)
    step = functools.partial(loopback.run_step, method, layout, grads, states, 0)
    sound = step()
    assert {type(r).__name__ for r in sound.requests} == kinds
    for number, victim in itertools.product(range(len(sound.requests)), range(3)):

        def fault(at, rank, rows, number=number, victim=victim):
            if (at, rank) != (number, victim):
                return rows
            damaged = rows.numpy()
            damaged[0, -1] ^= 1 << 9
            return tf.constant(damaged)

        request = sound.requests[number]
        sender = victim & ~request.distance if isinstance(request, PairGather) else 0
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            step(fault=fault)
        assert f"by worker {victim} from worker {sender}" in str(caught.value).replace(":", "")
    nothing = step(fault=lambda at, rank, rows: rows)
    np.testing.assert_array_equal(nothing.totals[0][0], sound.totals[0][0])
