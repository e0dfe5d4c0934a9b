"""All-gathers of pairs: each worker's messages, from every network within one process."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.auto import cost
from tf_redsync.contrib.common import recursive_doubling
from tf_redsync.exchange import loopback, traffic
from tf_redsync.exchange.driver import drive
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import PairGather
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.exchange.traits import Traits
from tf_redsync.network.collectives import Alone, PublicCollectives
from tf_redsync.ops import wire

SPEC = TensorSpec("w", (2, 2))
ABSENT = [1, 0]


def expected(rank, distance, workers):
    """Returns the own message and that of rank XOR distance, the lower rank's first."""
    both = sorted((rank, rank ^ distance))
    return [[1, 10 + r] if r < workers else ABSENT for r in both]


class Pairs(rs.Method):
    """Its totals are the gathered rows."""

    traits = Traits(totals_may_overflow=False)
    distance: int = 1

    def exchange(self, grads, state, ctx):
        rows = yield PairGather(tf.stack([1, 10 + ctx.rank]), self.distance)
        return [tf.cast(rows, tf.float32)], state


def with_distance(distance):
    method = Pairs()
    object.__setattr__(method, "distance", distance)
    return method


@loop("distance", [1, 2, 4, 8])
@loop("workers", [1, 2, 5, 8])
def test_loopback(workers, distance):
    layout, grads = BucketLayout((SPEC,), workers), [[tf.zeros([2, 2])]] * workers
    method, states = with_distance(distance), [{}] * workers
    for run in (
        lambda: loopback.run_step(method, layout, grads, states, 0),
        lambda: loopback.traced_step(method, layout)(grads, states, 0),
    ):
        step = run()
        for rank, (rows,) in enumerate(step.totals):
            assert rows.numpy().tolist() == expected(rank, distance, workers)
        (request,) = step.requests
        assert type(request) is PairGather and request.distance == distance
        assert step.finite and step.bytes_sent == (8 if workers > 1 else 0)


def test_loopback_detects_mismatched_partners():
    class Mixed(rs.Method):
        def exchange(self, grads, state, ctx):
            yield PairGather(tf.constant([1, 0]), 1 + int(ctx.rank))

    layout = BucketLayout((SPEC,), 2)
    with pytest.raises(ValueError, match="different collectives"):
        loopback.run_step(Mixed(), layout, [[tf.zeros([2, 2])]] * 2, [{}, {}], 0)


@pytest.mark.parametrize(
    ("network", "distance", "row"),
    [(Alone(), 1, ABSENT), (DryRun(2), 1, [1, 7]), (DryRun(2), 2, ABSENT), (DryRun(5), 4, [1, 7])],
)
def test_alone_and_dry(network, distance, row):
    def exchange():
        return (yield PairGather(tf.constant([1, 7]), distance))

    outcome = drive([exchange()], network)
    assert outcome.results[0].numpy().tolist() == [[1, 7], row]
    assert bool(outcome.finite) and outcome.bytes_sent == (0 if network.workers == 1 else 8)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_replicas_of_one_process(mirrored, workers, traced):
    strategy, network = mirrored(workers), PublicCollectives(workers)

    def replica():
        message = tf.stack([1, 10 + network.rank()])
        return [network.pair_gather(message, distance) for distance in (1, 2)]

    step = tf.function(strategy.run) if traced else strategy.run
    for distance, found in zip((1, 2), step(replica), strict=True):
        for rank, rows in enumerate(strategy.experimental_local_results(found)):
            assert rows.shape == [2, 2]
            assert rows.numpy().tolist() == expected(rank, distance, workers)


@pytest.mark.parametrize("distance", [0, -1, 3, 12])
def test_partners_differ_in_one_bit(distance):
    with pytest.raises(ValueError, match=f"`distance` must be a power.*distance={distance}"):
        PairGather(tf.zeros([1], tf.int32), distance)


@loop("workers", range(1, 18))
def test_all_messages_arrive_after_all_rounds(workers):
    """Followed on sets of ranks; no rank is counted twice."""
    first, doubling, last = recursive_doubling.rounds(workers)
    known = [(rank,) for rank in range(workers)]

    def exchanged(distance):
        others = [known[r ^ distance] if r ^ distance < workers else () for r in range(workers)]
        return [own + other for own, other in zip(known, others, strict=True)]

    if first is not None:
        known = [k if r < first else () for r, k in enumerate(exchanged(first))]
    for distance in doubling:
        known = exchanged(distance)
    if last is not None:
        known = [known[rank & ~last] for rank in range(workers)]
    assert all(sorted(k) == list(range(workers)) for k in known)
    assert len(doubling) == max(1, int(np.log2(workers)))


def test_cost_of_a_pair_is_one_hop_of_an_all_gather():
    assert [cost.hops("pair_gather", p) for p in (1, 2, 7)] == [0, 1, 1]
    link = cost.Link(cost.Line(0.001, 1e6), cost.Line(1.0, 1.0), cost.Line(1.0, 1.0))
    assert link.seconds([traffic.Message("pair_gather", 1e4)], 8) == pytest.approx(0.001 + 0.01)
    layout = BucketLayout((TensorSpec("w", (40, 50)),), 8)
    messages = traffic.messages(rs.contrib.GTopK(density=0.01), layout)
    assert [[(m.kind, m.sent) for m in step] for step in messages] == [
        [("pair_gather", 4 * (2 + 2 * 20))] * 3
    ]


def test_absent_message_is_finite_and_empty():
    message = wire.absent(tf.constant([0, 5, 6]))
    assert message.dtype == tf.int32 and message.numpy().tolist() == [1, 0, 0]
