"""1-bit Adam and 0/1 Adam on two real workers under each family, against numpy."""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers
from tests.distributed.resuming import library
from tests.oracle.signs import OneBitAdamOracle, OneBitOracle

STEPS, DENSE, BATCH, BAD = 9, 4, 8, 6
# 0/1 Adam: dense in steps 0, 1, 2 and 4; rounds of 1 step from step 7 and of 2 from step 11.
LONG, START, DOUBLE = 15, 7, 4
DENSE_STEPS, LENGTHS = (0, 1, 2, 4, 6), {7: 1, 8: 1, 9: 1, 10: 1, 11: 2, 12: 2, 13: 2, 14: 2}
RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.05, 0.8, 0.99, 1e-3, 0.1
UNSEEN = 5  # an input that is always 0, so its weight has no gradient
SHORT = {"keras3": ("AdamW",), "tf_keras": (), "legacy": ("Adam",)}
CASES = {**SHORT, "keras3": ("Adam", "AdamW"), "tf_keras": ("Adam", "AdamW")} if DEEP else SHORT
PAIRS = [(family, name) for family, names in CASES.items() for name in names]


def data_of(rank, steps=STEPS):
    """A worker's own batches; in steps `BAD` and `2 * BAD` those of rank 1 contain a NaN."""
    generator = np.random.default_rng(rank)
    x = generator.standard_normal((steps, BATCH, 12)).astype(np.float32)
    x[..., UNSEEN] = 0.0
    y = x @ np.arange(12, dtype=np.float32)[:, None] / 12 + rank
    if rank == 1:
        y[BAD::BAD, 0] = np.nan
    return x, y.astype(np.float32)


def train():
    import tf_redsync as rs

    strategy, results = rs.MultiWorkerMirroredStrategy(), {}
    for family, name in PAIRS:
        found = train_one(strategy, family, name)
        results |= {f"{family}/{name}/{key}": value for key, value in found.items()}
        found = train_one(strategy, family, name, zero_one=True)
        results |= {f"{family}/{name}/0/1/{key}": value for key, value in found.items()}
    results |= {
        "error_texts": error_texts(strategy),
        "constant_gradient": constant_gradient(strategy),
        "decayed_rate": constant_gradient(strategy, drop=10),
    }
    return results | (of_fit(strategy) if DEEP else {})


def of_fit(strategy):
    """Weights after `fit` of 8 steps, by fractions and by steps, and the warnings."""
    import warnings

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    found = {}
    for name, given in (
        ("fractions", {"start": 0.5, "double_after": 0.25}),
        ("steps", {"start": 4, "double_after": 2}),
        ("long", {"start": 8}),
    ):
        with strategy.scope():
            model = problems.network(keras)
            method = rs.contrib.ZeroOneAdam(steps=4, variance_updates=1, **given)
            model.compile(rs.DistributedOptimizer(keras.optimizers.Adam(0.01), method), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model.fit(problems.dataset(64, 16), epochs=2, verbose=0)
        found[f"fit/{name}"] = np.concatenate([np.ravel(w) for w in model.get_weights()])
        texts = [str(w.message) for w in caught if "local step" in str(w.message)]
        found[f"fit/{name}/warned"] = "\n".join(texts)
    return found


def constant_gradient(strategy, drop=None):
    """Weights of 0/1 Adam with a gradient that is always 1: one bit encodes it without an error.

    From step `drop` on a schedule divides the learning rate by 100.
    """
    import keras
    import tensorflow as tf

    import tf_redsync as rs

    with strategy.scope():
        variable = keras.Variable(np.zeros([8], np.float32))
        rate = RATE
        if drop is not None:  # a boundary is the last step with the rate before it
            decay = keras.optimizers.schedules.PiecewiseConstantDecay
            rate = decay([drop - 1], [RATE, RATE / 100])
        method = rs.contrib.ZeroOneAdam(start=3, steps=4, double_after=4, variance_updates=2)
        optimizer = rs.DistributedOptimizer(keras.optimizers.Adam(rate), method)
        optimizer.build([variable])
    share = tf.ones([8]) / strategy.num_replicas_in_sync
    step = tf.function(
        lambda: strategy.run(lambda: optimizer.apply([share], [variable])), autograph=False
    )
    weights = []
    for _ in range(20):
        step()
        weights.append(variable.numpy())
    return np.array(weights)


def train_one(strategy, family, name, zero_one=False):
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    keras = library(family)
    home = keras.optimizers.legacy if family == "legacy" else keras.optimizers
    decay = {"weight_decay": DECAY} if name == "AdamW" else {}
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((12,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        inner = getattr(home, name)(
            learning_rate=RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON, **decay
        )
        method = rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(DENSE), beta_1=BETA_1, dense_below=0)
        if zero_one:
            method = rs.contrib.ZeroOneAdam(
                start=START, steps=2, double_after=DOUBLE, variance_updates=2,
                beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON,
            )  # fmt: skip
        optimizer = rs.DistributedOptimizer(inner, method)
        optimizer.build(model.trainable_variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda x, y: strategy.run(replica_step, (x, y)), autograph=False)
    weights, sent = [], []
    for x, y in zip(*data_of(problems.rank(), LONG if zero_one else STEPS), strict=True):
        run(tf.constant(x), tf.constant(y))
        weights.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
        sent.append(float(optimizer.exchange.bytes_sent.numpy()))
    return {"weights": weights, "sent": sent, "skipped": int(optimizer.exchange.skipped.numpy())}


def error_texts(strategy):
    """Error texts for other optimizers."""
    import keras

    import tf_redsync as rs

    found = []
    for inner in (keras.optimizers.SGD(0.1), keras.optimizers.Adam(amsgrad=True)):
        with strategy.scope():
            try:
                rs.DistributedOptimizer(inner, rs.contrib.OneBitAdam())
            except ValueError as error:
                found.append(str(error))
    return "\n".join(found)


@pytest.fixture(scope="module")
def trained():
    return run_workers(train, env=LEGACY, timeout=200)


def expected(decay):
    """Adam for some steps, then the paper's second stage for the kernel, with corrected variance.

    The bias is always updated by Adam.
    """
    data = [data_of(rank) for rank in range(2)]
    w, m, v, t, history = np.append(np.ones(12), 0.0), np.zeros(13), np.zeros(13), 0, []
    oracle = None
    for step in range(STEPS):
        gradients = []
        for x, y in ((a[step].astype(np.float64) for a in own) for own in data):
            error = x @ w[:12, None] + w[12] - y
            gradients.append(np.append(2 * (x.T @ error).ravel(), 2 * error.sum()) / BATCH / 2)
        if not np.isfinite(gradients).all():
            history.append(w)
            continue
        t += 1
        before = m
        m = BETA_1 * m + (1 - BETA_1) * sum(gradients)
        v = BETA_2 * v + (1 - BETA_2) * sum(gradients) ** 2
        if step < DENSE:
            corrected = v / (1 - BETA_2**t)
        else:
            if oracle is None:
                oracle = OneBitAdamOracle([(12,)], 2, BETA_1, [before[:12]], [v[:12]])
            (m[:12],) = oracle.step([[g[:12]] for g in gradients])
            corrected[12] = v[12] / (1 - BETA_2**t)
        w = w - RATE * decay * w
        # Keras adds epsilon to the root of the variance.
        root = np.sqrt(corrected) + EPSILON / np.sqrt(1 - BETA_2**t)
        w = w - RATE * m / (1 - BETA_1**t) / root
        history.append(w)
    return history


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_weights_follow_the_paper(trained, family, name):
    history = expected(DECAY if name == "AdamW" else 0.0)
    for worker in trained:
        np.testing.assert_allclose(
            worker[f"{family}/{name}/weights"], history, rtol=2e-4, atol=2e-5
        )
        assert worker[f"{family}/{name}/skipped"] == 1
    np.testing.assert_array_equal(*(w[f"{family}/{name}/weights"] for w in trained))


def zero_one(decay):
    """The algorithm of the 0/1 Adam paper for each worker; its bias corrections are Adam's.

    The rates of a round are those of Adam's steps, each by the number of steps so far.
    """
    data = [data_of(rank, LONG) for rank in range(2)]
    agreed, variance, updates, rates, since = np.append(np.ones(12), 0.0), np.zeros(13), 0, 0.0, 0
    weights, momenta, t = [agreed] * 2, [np.zeros(13)] * 2, [0, 0]
    signs, history = OneBitOracle([(12,), (1,)], 2), []

    def in_one_bit(own):
        masked = [np.where(variance > 0, m, 0) for m in own]
        seen = [variance[:12] > 0, variance[12:] > 0]
        return np.concatenate(signs.step([[m[:12], m[12:]] for m in masked], seen))

    def after_local_step(worker):
        t[worker] += 1
        root = np.sqrt(variance) + EPSILON / np.sqrt(1 - BETA_2 ** t[worker])
        kept = weights[worker] * (1 - RATE * decay)
        return kept - RATE * momenta[worker] / (1 - BETA_1 ** t[worker]) / root

    for step in range(LONG):
        gradients = []
        for w, (x, y) in zip(weights, data, strict=True):
            x, y = np.float64(x[step]), np.float64(y[step])
            error = x @ w[:12, None] + w[12] - y
            gradients.append(np.append(2 * (x.T @ error).ravel(), 2 * error.sum()) / BATCH)
        finite = [np.isfinite(g).all() for g in gradients]
        if step < START and all(finite):
            if step in DENSE_STEPS:
                mean, updates = sum(gradients) / 2, updates + 1
                weight = (1 - BETA_2) / (1 - BETA_2**updates)
                variance = variance + weight * (mean**2 - variance)
                momentum = BETA_1 * momenta[0] + (1 - BETA_1) * mean
            else:
                pairs = zip(momenta, gradients, strict=True)
                own = [(BETA_1 * m + (1 - BETA_1) * g) / 2 for m, g in pairs]
                momentum = in_one_bit(own)
            momenta = [momentum] * 2
            weights = [after_local_step(worker) for worker in range(2)]
            agreed = weights[0]
        elif step >= START:
            for worker in range(2):
                if finite[worker]:
                    m = BETA_1 * momenta[worker] + (1 - BETA_1) * gradients[worker]
                    momenta[worker] = np.where(variance > 0, m, 0)
                    weights[worker] = after_local_step(worker)
            rates, since = rates + RATE / (1 - BETA_1 ** (step + 1)), since + 1
            if since >= LENGTHS[step]:
                p = np.sqrt(variance) + EPSILON
                momentum = in_one_bit([p * (agreed - w) / rates / 2 for w in weights])
                agreed = agreed - rates * momentum / p
                weights, momenta, rates, since = [agreed] * 2, [momentum] * 2, 0.0, 0
                t = [max(t)] * 2  # the paper uses one t
        history.append(list(weights))
    return np.array(history)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_0_1_adam(trained, family, name):
    history = zero_one(DECAY if name == "AdamW" else 0.0)
    for rank, worker in enumerate(trained):
        found = worker[f"{family}/{name}/0/1/weights"]
        np.testing.assert_allclose(found, history[:, rank], rtol=5e-4, atol=5e-5)
    ours, theirs = (np.array(w[f"{family}/{name}/0/1/weights"]) for w in trained)
    together = [step in (*range(11), 12, 14) for step in range(LONG)]
    np.testing.assert_array_equal((ours == theirs).all(axis=1), together)


def test_0_1_adam_with_constant_gradient(trained):
    """With a constant gradient, Adam's steps equal the learning rate, and so do both stages' steps.

    Early rounds differ: the mean momentum of a round is that of its middle, while momenta grow.
    """
    expected = -RATE * np.arange(1, 21)[:, None] * np.ones(8)
    for worker in trained:
        np.testing.assert_allclose(worker["constant_gradient"], expected, rtol=0.04)


def test_0_1_adam_divides_by_rates_of_its_steps(trained):
    """The momentum of a round is its change over the rates that a schedule had in its steps.

    With the rates after the steps, the momentum would grow by a factor of 100 when they drop.
    """
    rates = np.where(np.arange(20) < 10, RATE, RATE / 100)
    for worker in trained:
        found = worker["decayed_rate"][:, 0]
        np.testing.assert_allclose(found, -np.cumsum(rates), rtol=0.04)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_bytes_of_0_1_adam(trained, family, name):
    """13 floats in dense steps, bits of two tensors in others; one rate at the end of a round."""
    sent = trained[0][f"{family}/{name}/0/1/sent"]
    bits = 2 * 4 * (1 + 2 * (2 + 1))
    expected = [4 * 13 if t in DENSE_STEPS else bits for t in range(START)]
    expected += [(bits + 4) * (t in (7, 8, 9, 10, 12, 14)) for t in range(START, LONG)]
    np.testing.assert_array_equal(sent, expected)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_weights_without_gradient_stay(trained, family, name):
    weights = np.array(trained[0][f"{family}/{name}/weights"])[:, UNSEEN]
    updates = np.arange(1, STEPS + 1) - (np.arange(STEPS) >= BAD)
    kept = (1 - RATE * DECAY) ** updates if name == "AdamW" else np.ones(STEPS)
    np.testing.assert_allclose(weights, kept, rtol=1e-5)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_bytes(trained, family, name):
    """An all-reduce of 13 floats; then one float, and twice a flag, two means, a word of bits."""
    sent = trained[0][f"{family}/{name}/sent"]
    np.testing.assert_array_equal(sent[:DENSE], 4 * 13)
    np.testing.assert_array_equal(sent[DENSE:], 4 + 2 * 4 * (1 + 2 + 1))


def test_other_optimizers_raise(trained):
    text = str(trained[0]["error_texts"])
    assert "Received: SGD." in text and "Received: Adam(amsgrad=True)" in text


@pytest.mark.deep  # tests/unit/test_warm_up.py tests how fractions are computed
def test_fractions_refer_to_steps_of_fit(trained):
    for found in trained:
        np.testing.assert_array_equal(found["fit/fractions"], found["fit/steps"])
        assert np.abs(found["fit/fractions"] - found["fit/long"]).max() > 1e-4
        assert found["fit/fractions/warned"] == found["fit/steps/warned"] == ""
        assert "local steps of ZeroOneAdam begin after 8" in found["fit/long/warned"]
