"""The driver: rounds, order, results, bytes and finiteness."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import checked, drive
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather
from tf_redsync.exchange.traffic import DryRun


class Recorder:
    """A network of two equal workers that records its requests."""

    workers = 2
    checksums = False

    def __init__(self):
        self.log = []

    def all_gather(self, message):
        self.log.append(("gather", message.numpy().tolist()))
        return tf.stack([message, message])

    def all_reduce(self, tensors):
        self.log.append(("reduce", [t.numpy().tolist() for t in tensors]))
        return [2 * t for t in tensors]

    def all_to_all(self, messages):
        self.log.append(("to_all", messages.numpy().tolist()))
        return messages


def gather_twice(tag):
    first = yield AllGather(tf.constant([1, tag]))
    second = yield AllGather(tf.constant([1, int(first[1, 1]) + 1]))
    return int(second[0, 1])


def reduce_once(value):
    (total,) = yield AllReduce([tf.constant(value)])
    return float(total)


def no_requests(result):
    yield from ()
    return result


def test_round_by_round_and_in_order():
    network = Recorder()
    outcome = drive(
        [gather_twice(10), reduce_once(3.0), no_requests("x"), gather_twice(20)], network
    )
    assert outcome.results == [11, 6.0, "x", 21]
    assert network.log == [
        ("gather", [1, 10]),
        ("reduce", [3.0]),
        ("gather", [1, 20]),
        ("gather", [1, 11]),
        ("gather", [1, 21]),
    ]
    # Four messages of 8 bytes to one other worker, and 2 * 4 * 1/2 bytes of the sum.
    assert outcome.bytes_sent == 4 * 8 + 4
    assert bool(outcome.finite)


def test_empty_exchange_is_finite_and_free():
    outcome = drive([], Recorder())
    assert outcome.results == [] and bool(outcome.finite) and outcome.bytes_sent == 0


@pytest.mark.parametrize("bad", ["sum", "flag"])
def test_one_nonfinite_exchange_makes_the_step_nonfinite(bad):
    def flagged(flag):
        yield AllGather(tf.constant([flag, 0]))

    exchanges = [reduce_once(np.nan if bad == "sum" else 1.0), flagged(0 if bad == "flag" else 1)]
    assert not drive(exchanges, Recorder()).finite
    assert not drive(exchanges[:0] + [flagged(1), reduce_once(np.inf)], Recorder()).finite


def test_all_to_all():
    def swap():
        reply = yield AllToAll(tf.constant([[1, 2], [1, 3]]))
        return reply.numpy().tolist()

    network = Recorder()
    assert drive([swap()], network).results == [[[1, 2], [1, 3]]]
    assert network.log == [("to_all", [[1, 2], [1, 3]])]


FLOATS = tf.zeros([2, 3])


@loop(
    ("yielded", "named"),
    [
        (None, "AllGather, .* Received: NoneType"),
        ([FLOATS], r"AllGather, .* Received: \[float32 \(2, 3\)\]"),
        (AllGather(FLOATS), "AllGather .*int32 .* Received: .*float32"),
        (AllToAll(FLOATS), "AllToAll .*int32 .* Received: .*float32"),
        (PairGather([1, 2], 1), "PairGather .*int32 .* Received: .*int"),
        (AllReduce(FLOATS), "AllReduce .*list .* Received: float32"),
        (AllReduce([tf.constant(1)]), "AllReduce .*floating-point .* Received: .*int32"),
    ],
)
def test_bad_requests_are_rejected_before_they_are_sealed(yielded, named):
    def start(grads, state, ctx):
        yield yielded

    network = Recorder()
    network.checksums = True
    ctx = Context(BucketLayout((), 2), 0, tf.constant(0, tf.int64))
    with pytest.raises(TypeError, match=f"Dense must yield {named}"):
        drive([checked(rs.Dense(), start, [], {}, ctx)], network)
    assert not network.log


def test_dry_run_has_the_right_shapes():
    network = DryRun(5)
    assert network.all_gather(tf.zeros([3], tf.int32)).shape == [5, 3]
    assert [t.shape for t in network.all_reduce([tf.zeros([2, 2]), tf.zeros([])])] == [(2, 2), ()]
    assert network.all_to_all(tf.zeros([5, 4], tf.int32)).shape == [5, 4]
