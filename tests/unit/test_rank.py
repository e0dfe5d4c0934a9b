"""Every network passes the worker's rank to its exchange."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.network.collectives import Alone, PublicCollectives
from tf_redsync.step.exchange_schedule import ExchangeSchedule, Inputs

MOST = 5  # workers
SPEC = TensorSpec("w", (MOST,))


class Ranked(rs.Method):
    """Its total holds the gathered ranks, and 0 for absent workers."""

    def exchange(self, grads, state, ctx):
        messages = yield AllGather(tf.stack([1, ctx.rank]))
        ranks = tf.cast(messages[:, 1], tf.float32)
        return [tf.pad(ranks, [[0, MOST - ctx.layout.workers]])], state

    dense_exchange = exchange


def gathered_ranks(network):
    program = ExchangeSchedule(make_buckets([(SPEC, Ranked())], network.workers))
    step = tf.constant(0, tf.int64)
    return program.run(Inputs([[tf.zeros([MOST])]], [{}], None, step, network)).results[0][0][0]


def test_loopback():
    layout = BucketLayout((SPEC,), 5)
    step = loopback.run_step(Ranked(), layout, [[tf.zeros([5])]] * 5, [{}] * 5, 0)
    np.testing.assert_array_equal(step.totals[2][0], np.arange(5))


def test_alone_and_dry():
    np.testing.assert_array_equal(gathered_ranks(Alone()), [0, 0, 0, 0, 0])
    np.testing.assert_array_equal(gathered_ranks(DryRun(3)), [0, 0, 0, 0, 0])


@pytest.mark.parametrize("traced", [False, True])
def test_replicas_of_one_process(mirrored, traced):
    """The rank is the row of the replica's message."""
    strategy = mirrored(3)

    def replica():
        return gathered_ranks(PublicCollectives(3))

    step = (lambda: strategy.run(replica)) if not traced else tf.function(strategy.run)
    result = step(replica) if traced else step()
    for ranks in strategy.experimental_local_results(result):
        np.testing.assert_array_equal(ranks, [0, 1, 2, 0, 0])


def test_layout_is_independent_of_the_worker():
    assert {f.name for f in dataclasses.fields(BucketLayout)} == {
        "specs", "workers", "index", "sparse_totals"
    }  # fmt: skip
    assert hash(BucketLayout((SPEC,), 2)) == hash(BucketLayout((SPEC,), 2))
