"""Ranks of many workers: what comes back from a network is in their order, whatever TensorFlow's.

TensorFlow sorts the rows of its gathers by the text of a task's name, so that "task:10" comes
before "task:2". The oracle is the loopback, on which rank r is the r-th worker: each method has
to give its bits, on eleven workers, and on a chief and eleven workers.
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
# Those that take a row for a worker, or a worker for a row.
# One for each pattern of requests.
BY_RANK = ("one_bit_sgd", "gtopk", "redsync_auto")
NAMES = tuple(TABLE) if DEEP else BY_RANK


def work(names):
    """Everything that this worker finds: rows of all networks, and hashes of all methods."""
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    found = networks(strategy)
    own, loopback = hashes(strategy, names)
    return {**found, "own": json.dumps(own), "loopback": json.dumps(loopback)}


def networks(strategy):
    """What the requests bring back from the networks that workers may have."""
    import tensorflow as tf

    from tf_redsync.network import collectives

    workers = strategy.num_replicas_in_sync
    direct = collectives.DirectCollectives(workers, strategy)
    hosts = collectives.HostCollectives(strategy)
    public = collectives.PublicCollectives(workers)
    found = {"rank": collectives.worker_rank(strategy)}
    for name, network in (("direct", direct), ("hosts", hosts), ("public", public)):

        def replica(network=network):
            rank = network.rank()
            gathered = network.all_gather(tf.stack([rank, 7]))
            sent = 100 * rank + tf.range(workers)
            received = network.all_to_all(tf.stack([sent, -sent], axis=1))
            pairs = [network.pair_gather(tf.stack([1, rank]), d) for d in DISTANCES]
            return gathered, received, tf.stack(pairs)

        ask = functools.partial(strategy.run, replica)
        if network is public:  # which would make a function of each gather
            ask = tf.function(ask, autograph=False)
        for what, result in zip(("rows", "received", "pairs"), ask(), strict=True):
            found[f"{name}/{what}"] = result.numpy()
    return found | by_tensorflow(strategy)


def by_tensorflow(strategy):
    """What a user's gathers return, with as many rows of a worker as its rank and one more."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context

    def rows(context):
        rank = context.replica_id_in_sync_group
        return tf.fill([2, rank + 1], tf.cast(rank, tf.float32))

    value = strategy.experimental_distribute_values_from_function(rows)
    gathered = strategy.run(lambda v: context().all_gather(v, axis=1), args=(value,))
    found = {"gather": strategy.gather(value, axis=1).numpy(), "all_gather": gathered.numpy()}
    return found | (predicted(strategy) if DEEP else {})


def predicted(strategy):
    """What Keras concatenates by `gather`."""
    import keras
    import tensorflow as tf

    data = tf.data.Dataset.range(4 * strategy.num_replicas_in_sync - 3).map(lambda i: i[tf.newaxis])
    data = data.batch(2 * strategy.num_replicas_in_sync)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Rescaling(2.0)])
    return {"predicted": model.predict(data, verbose=0)[:, 0]}


def hashes(strategy, names):
    """By method and step: this worker's hash; and where it is its turn, all on the loopback."""
    import tensorflow as tf

    from tests.conformance import harness
    from tf_redsync.exchange import driver
    from tf_redsync.exchange import loopback as all_workers
    from tf_redsync.exchange.layout import BucketLayout
    from tf_redsync.network import collectives

    class SumsInOrder(collectives.DirectCollectives):
        """Adds up in the order of ranks, as the loopback does; a ring rounds in another one."""

        def all_reduce(self, tensors):
            # A gather does not take bfloat16, which float32 holds.
            wide = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
            rows = [self.all_gather(tf.reshape(t, [-1])) for t in wide]
            rows = [tf.cast(r, t.dtype) for r, t in zip(rows, tensors, strict=True)]
            sums = [tf.add_n(tf.unstack(r)) for r in rows]
            return [tf.reshape(s, t.shape) for s, t in zip(sums, tensors, strict=True)]

    workers, rank = strategy.num_replicas_in_sync, collectives.worker_rank(strategy)
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
    """A hash of the bits of what one worker has after a step."""
    arrays = [*totals, *(t for name in sorted(state) for t in state[name])]
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]


CLUSTERS = [(11, False), *([(12, True)] if DEEP else [])]


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda p: f"{p[0]}{' chief' * p[1]}")
def found(request):
    workers, chief = request.param
    return run_workers(work, workers, (NAMES,), timeout=1200 if DEEP else 280, chief=chief)


def test_ranks_are_those_of_the_cluster(found):
    assert [f["rank"] for f in found] == list(range(len(found)))


@pytest.mark.parametrize("name", ["direct", "hosts", "public"])
def test_rows_are_in_the_order_of_ranks(found, name):
    workers = len(found)
    for rank, here in enumerate(found):
        assert here[f"{name}/rows"].tolist() == [[r, 7] for r in range(workers)], rank
        received = [[100 * r + rank, -100 * r - rank] for r in range(workers)]
        assert here[f"{name}/received"].tolist() == received, rank
        for rows, distance in zip(here[f"{name}/pairs"], DISTANCES, strict=True):
            ranks = sorted((rank, rank ^ distance))
            wanted = [[1, r] if r < workers else [1, 0] for r in ranks]
            assert rows.tolist() == wanted, (rank, distance)


def test_what_users_gather_is_in_the_order_of_ranks(found):
    workers = len(found)
    row = np.repeat(np.arange(workers), np.arange(workers) + 1)
    for here in found:
        np.testing.assert_array_equal(here["gather"], [row, row])
        np.testing.assert_array_equal(here["all_gather"], [row, row])
        if DEEP:
            np.testing.assert_array_equal(here["predicted"], 2.0 * np.arange(4 * workers - 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_method_gives_the_loopbacks_bits(found, name):
    """In every step, on every worker, in its totals and in its state."""
    (loopback,) = [json.loads(f["loopback"])[name] for f in found if name in f["loopback"]]
    for rank, here in enumerate(found):
        own = json.loads(here["own"])[name]
        assert own == [step[rank] for step in loopback], rank
