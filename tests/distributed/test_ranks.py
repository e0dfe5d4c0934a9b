"""Rows of all requests are in the order of ranks, for many workers.

TensorFlow sorts the rows of a gather by the text of the task's name: "task:10" comes before
"task:2". The reference is the loopback, where rank r is the r-th worker: each method must give its
bits, on eleven workers, and on a chief and eleven workers.
"""

import functools
import hashlib
import json

import numpy as np
import pytest

from tests.conformance.table import TABLE
from tests.deep import DEEP
from tests.distributed.cluster import run_workers

DISTANCES = (1, 2, 4, 8)
STEPS = 2 if DEEP else 1
# A tensor that most methods send densely, and two that they compress.
POSITIONS = (2, 6, 9)
# Methods that map rows to workers.
BY_RANK = ("one_bit_sgd", "gtopk", "redsync_auto")
NAMES = tuple(TABLE) if DEEP else BY_RANK


def work(names):
    """Rows of all networks and hashes of all methods on this worker."""
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    results = networks(strategy)
    own, loopback = hashes(strategy, names)
    return {**results, "own": json.dumps(own), "loopback": json.dumps(loopback)}


def networks(strategy):
    """Replies of all networks to each request."""
    import tensorflow as tf

    from tf_redsync.network import collectives, strategies

    workers = strategy.num_replicas_in_sync
    direct = collectives.DirectCollectives(workers, strategy)
    hosts = collectives.HostCollectives(strategy)
    public = collectives.PublicCollectives(workers)
    results = {"rank": strategies.process_rank(strategy)}
    for name, network in (("direct", direct), ("hosts", hosts), ("public", public)):

        def replica(network=network):
            rank = network.rank()
            gathered = network.all_gather(tf.stack([rank, 7]))
            sent = 100 * rank + tf.range(workers)
            received = network.all_to_all(tf.stack([sent, -sent], axis=1))
            pairs = [network.pair_gather(tf.stack([1, rank]), d) for d in DISTANCES]
            return gathered, received, tf.stack(pairs)

        ask = functools.partial(strategy.run, replica)
        if network is public:  # otherwise each gather becomes a function
            ask = tf.function(ask, autograph=False)
        for request, result in zip(("rows", "received", "pairs"), ask(), strict=True):
            results[f"{name}/{request}"] = result.numpy()
    return results | user_gathers(strategy)


def user_gathers(strategy):
    """Results of a user's gathers; a worker has rank + 1 rows."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context

    def rows(context):
        rank = context.replica_id_in_sync_group
        return tf.fill([2, rank + 1], tf.cast(rank, tf.float32))

    value = strategy.experimental_distribute_values_from_function(rows)
    gathered = strategy.run(lambda v: context().all_gather(v, axis=1), args=(value,))
    results = {"gather": strategy.gather(value, axis=1).numpy(), "all_gather": gathered.numpy()}
    return results | (gathered_predictions(strategy) if DEEP else {})


def gathered_predictions(strategy):
    """Rows that Keras concatenates by `gather`."""
    import keras
    import tensorflow as tf

    data = tf.data.Dataset.range(4 * strategy.num_replicas_in_sync - 3).map(lambda i: i[tf.newaxis])
    data = data.batch(2 * strategy.num_replicas_in_sync)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Rescaling(2.0)])
    return {"gathered_predictions": model.predict(data, verbose=0)[:, 0]}


def hashes(strategy, names):
    """This worker's hashes by method and step; every worker runs some methods on the loopback."""
    import tensorflow as tf

    from tests.conformance import harness
    from tf_redsync.exchange import driver
    from tf_redsync.exchange import loopback as all_workers
    from tf_redsync.exchange.layout import BucketLayout
    from tf_redsync.network import collectives, strategies

    class SumsInOrder(collectives.DirectCollectives):
        """Adds in the order of ranks, as the loopback does; a ring rounds in another order."""

        def all_reduce(self, tensors):
            # Gathers do not support bfloat16; float32 represents it exactly.
            wide = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
            rows = [self.all_gather(tf.reshape(t, [-1])) for t in wide]
            rows = [tf.cast(r, t.dtype) for r, t in zip(rows, tensors, strict=True)]
            sums = [tf.add_n(tf.unstack(r)) for r in rows]
            return [tf.reshape(s, t.shape) for s, t in zip(sums, tensors, strict=True)]

    workers, rank = strategy.num_replicas_in_sync, strategies.process_rank(strategy)
    network = SumsInOrder(workers, strategy)
    own, loopback = {}, {}
    for number, name in enumerate(names):
        descriptor = TABLE[name]
        specs = tuple(s for s in descriptor.specs if s.position in POSITIONS)
        layout = BucketLayout(specs, workers)
        shapes = tuple(s.shape for s in specs)
        grads = [harness.make_grads(step, workers, shapes) for step in range(STEPS)]
        states = harness.initial_states(descriptor.method, layout, descriptor.start)
        state, own[name] = states[rank], []
        for step in range(STEPS):

            def replica(grads, state=state, step=step, method=descriptor.method, layout=layout):
                from tf_redsync.exchange.context import Context

                ctx = Context(layout, network.rank(), tf.constant(step, tf.int64))
                return driver.drive([method.exchange(grads, state, ctx)], network)

            outcome = strategy.run(replica, args=(harness.tensors(grads[step][rank]),))
            ((totals, state),) = outcome.results
            assert bool(outcome.finite)
            own[name].append(digest(totals, state))
        if number % workers == rank:
            loopback[name] = []
            for step in range(STEPS):
                inputs = harness.tensors(grads[step])
                done = all_workers.run_step(descriptor.method, layout, inputs, states, step)
                states = done.states
                loopback[name].append(
                    [digest(*pair) for pair in zip(done.totals, states, strict=True)]
                )
    return own, loopback


def digest(totals, state):
    """Hash of one worker's totals and state after a step."""
    arrays = [*totals, *(t for name in sorted(state) for t in state[name])]
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]


CLUSTERS = [(11, False), *([(12, True)] if DEEP else [])]


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda p: f"{p[0]}{' chief' * p[1]}")
def results(request):
    workers, chief = request.param
    return run_workers(work, workers, (NAMES,), timeout=1200 if DEEP else 280, chief=chief)


def test_ranks_are_those_of_the_cluster(results):
    assert [f["rank"] for f in results] == list(range(len(results)))


@pytest.mark.parametrize("name", ["direct", "hosts", "public"])
def test_rows_are_in_the_order_of_ranks(results, name):
    workers = len(results)
    for rank, here in enumerate(results):
        assert here[f"{name}/rows"].tolist() == [[r, 7] for r in range(workers)], rank
        received = [[100 * r + rank, -100 * r - rank] for r in range(workers)]
        assert here[f"{name}/received"].tolist() == received, rank
        for rows, distance in zip(here[f"{name}/pairs"], DISTANCES, strict=True):
            ranks = sorted((rank, rank ^ distance))
            expected = [[1, r] if r < workers else [1, 0] for r in ranks]
            assert rows.tolist() == expected, (rank, distance)


def test_user_gathers_are_in_order_of_ranks(results):
    workers = len(results)
    row = np.repeat(np.arange(workers), np.arange(workers) + 1)
    for here in results:
        np.testing.assert_array_equal(here["gather"], [row, row])
        np.testing.assert_array_equal(here["all_gather"], [row, row])
        if DEEP:
            np.testing.assert_array_equal(
                here["gathered_predictions"], 2.0 * np.arange(4 * workers - 3)
            )


@pytest.mark.parametrize("name", NAMES)
def test_method_equals_loopback_bit_for_bit(results, name):
    """In every step, on every worker, in totals and state."""
    (loopback,) = [json.loads(f["loopback"])[name] for f in results if name in f["loopback"]]
    for rank, here in enumerate(results):
        own = json.loads(here["own"])[name]
        assert own == [step[rank] for step in loopback], rank
