"""`SyncSchedule.averages` on real workers: second moments of CodedAdam against Adam's paper."""

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

SHAPES, WORKERS, STEPS, EVERY, BETA = ((6, 5), (7,)), 3, 19, 6, 0.9
DUE = {1, 2, 4, 6, 12, 18}
SKIPPED = 4  # worker 1 has a non-finite gradient in this step, from 1


def gradients(step, worker):
    """Mean gradients of a worker's examples, not yet divided by the number of workers."""
    draw = np.random.default_rng([step, worker]).standard_normal
    return [(1 + worker) * draw(shape).astype(np.float32) for shape in SHAPES]


def train(direct):
    """Second moments and bytes after each step, and the bytes that were predicted."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [
            keras.Variable(np.ones(s, np.float32), name=f"v{i}") for i, s in enumerate(SHAPES)
        ]
        method = rs.CodedAdam(density=0.2, beta_2=BETA, average_every=EVERY)
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(0.01), method, direct_collectives=direct
        )
        optimizer.build(variables)

    @tf.function
    def step(*grads):
        strategy.run(lambda: optimizer.apply([g / WORKERS for g in grads], variables))

    exchange, moments, sent = optimizer.exchange, [], []
    for number in range(1, STEPS + 1):
        grads = gradients(number, problems.rank())
        if (number, problems.rank()) == (SKIPPED, 1):
            grads[1][3] = np.nan
        step(*grads)
        state = {}
        for bucket, of_bucket in zip(exchange.schedule.buckets, exchange.states, strict=True):
            names = [spec.name for spec in bucket.layout.specs]
            state.update(zip(names, of_bucket.variables_by_name["variance"], strict=True))
        own = [strategy.experimental_local_results(state[v.path])[0] for v in variables]
        moments.append(np.concatenate([np.ravel(v) for v in own]))
        sent.append(float(exchange.bytes_sent.numpy()))
    return {
        "moments": np.stack(moments),
        "sent": np.array(sent),
        "predicted": optimizer.explain().bytes_per_step,
        "weights": np.concatenate([np.ravel(v) for v in variables]),
    }


def expected_moments(averaged=True):
    """Kingma, Ba (2015), algorithm 1, on each worker, with the factor K and means in steps DUE."""
    moments = [np.zeros(37) for _ in range(WORKERS)]
    expected, t = [], 0
    for number in range(1, STEPS + 1):
        if number != SKIPPED:
            t += 1
            for worker, moment in enumerate(moments):
                flat = [np.ravel(g) for g in gradients(number, worker)]
                moment *= BETA
                moment += (1 - BETA) * WORKERS * (np.concatenate(flat) / WORKERS) ** 2
        if averaged and number in DUE:
            moments = [np.mean(moments, axis=0) for _ in range(WORKERS)]
        expected.append([moment / (1 - BETA**t) for moment in moments])
    return np.array(expected)


@pytest.mark.parametrize("direct", [True, False])
def test_second_moments_of_workers(direct):
    """Public collectives cannot run in a branch, so they send the moments in every step."""
    found = run_workers(train, workers=WORKERS, args=(direct,))
    for worker, expected in enumerate(expected_moments().swapaxes(0, 1)):
        np.testing.assert_allclose(found[worker]["moments"], expected, rtol=1e-5)
        np.testing.assert_array_equal(found[worker]["weights"], found[0]["weights"])
    alone = expected_moments(averaged=False)
    assert np.abs(alone[:, 0] - alone[:, 1]).max() > 0.5  # the means matter
    of_means = 2 * (WORKERS - 1) / WORKERS * 4 * 37
    for worker in found:
        sent = worker["sent"]
        usual = sent.min()
        for number, size in enumerate(sent, start=1):
            extra = of_means if number in DUE else 0
            assert size == pytest.approx(usual + extra if direct else usual), number
        assert worker["predicted"] == pytest.approx(usual + of_means / EVERY if direct else usual)
