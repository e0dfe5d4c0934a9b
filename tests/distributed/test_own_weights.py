"""Methods with individual weights (local steps, delay, own points) on two workers.

The reference is numpy.
"""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers
from tests.oracle.block_quantization import quantized
from tests.oracle.sbc import binarized

# Cases by family. tf_keras optimizers reach the momentum that SBC clears and the weights that
# CD-SGD sets in other ways; the arithmetic is the same for all.
OUTER = ("diloco", "adamw", "outer_adam", "outer_rate", "one_step", "post_local")
STREAMING = ("one_fragment", "fragments", "late", "late_mean", "in_blocks", "late_in_blocks")
CASES = ("local_sgd", "sbc", "coded_topk", *OUTER, *STREAMING, "quadratic", "warm_up", "cd_sgd")
SHORT = {
    "keras3": (
        "local_sgd", "sbc", "adamw", "outer_adam", "post_local", "late", "late_in_blocks",
        "warm_up", "cd_sgd",
    ),
    "tf_keras": ("adamw",),
    "legacy": ("sbc", "cd_sgd"),
}  # fmt: skip
FITTED = ("sbc", "cd_sgd") if DEEP else ("cd_sgd",)
TRAINED = dict.fromkeys(("keras3", "tf_keras", "legacy"), CASES) if DEEP else SHORT
STEPS, BATCH, RATE, MOMENTUM = 7, 8, 0.05, 0.9
ADAM = {"learning_rate": 0.02, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3}


ADAMW = {"beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-3}  # of the inner optimizer
DECAY, WARM_UP, PEAK, LENGTH = 0.1, 2, 0.05, 8


def data_of(rank, same_inputs=False):
    """`STEPS` batches of a worker's own, from a different problem for each worker.

    With the same inputs for all workers in all steps, all losses have the same second derivatives.
    """
    generator = np.random.default_rng(0 if same_inputs else rank)
    x = generator.standard_normal((STEPS, BATCH, 12)).astype(np.float32)
    if same_inputs:
        x = np.repeat(x[:1], STEPS, axis=0)
    y = x @ np.arange(12, dtype=np.float32)[:, None] / 12 + rank
    return x, y.astype(np.float32)


def cases(rs):
    """Method, momentum, and whether all inputs are the same."""
    import keras

    fall = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25])
    return {
        "local_sgd": (rs.LocalSGD(steps=3), MOMENTUM, False),
        "sbc": (rs.SBC(steps=2, density=0.5, dense_below=0), MOMENTUM, False),
        "coded_topk": (rs.CodedTopK(steps=2, density=0.5, dense_below=0), MOMENTUM, False),
        "cd_sgd": (rs.CDSGD(full_every=1, warm_up=None), MOMENTUM, False),
        "quadratic": (rs.CDSGD(full_every=1, warm_up=None), 0.0, True),
        "warm_up": (rs.CDSGD(full_every=3, warm_up=rs.DenseWarmUp(2)), 0.0, False),
        "diloco": (rs.DiLoCo(steps=3), MOMENTUM, False),
        "adamw": (rs.DiLoCo(steps=3), 0.0, False),
        "outer_adam": (rs.LocalSGD(steps=2, outer=rs.outer.Adam(**ADAM)), 0.0, False),
        "outer_rate": (rs.LocalSGD(steps=2, outer=rs.outer.SGD(learning_rate=fall)), 0.0, False),
        "one_step": (rs.DiLoCo(steps=1, outer=rs.outer.SGD()), 0.0, False),
        "post_local": (rs.contrib.PostLocalSGD(start=3, steps=2), 0.0, False),
        "one_fragment": (streaming(rs, steps=3, fragments=1), MOMENTUM, False),
        "fragments": (streaming(rs, steps=4), MOMENTUM, False),
        "late": (streaming(rs, steps=4, overlap=2, mixing=0.25), MOMENTUM, False),
        "late_mean": (streaming(rs, steps=2, overlap=1, outer=None), 0.0, False),
        "in_blocks": (in_blocks(rs, steps=4), MOMENTUM, False),
        "late_in_blocks": (in_blocks(rs, steps=4, overlap=2, mixing=0.25), MOMENTUM, False),
    }


def streaming(rs, **options):
    options = {"fragments": ("kernel", "bias"), "overlap": 0, "mixing": 0.0, **options}
    return rs.StreamingDiLoCo(value_bits=32, **options)


def in_blocks(rs, **options):
    return rs.BlockQuantized(method=streaming(rs, **options), bits=4, block=32)


def train_everything(trained):
    """All cases of all families as `FAMILY/CASE/`, then `fit_apart`, in one job."""
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    results = {}
    for family, names in trained.items():
        found = train_all(strategy, family, names)
        results |= {f"{family}/{key}": value for key, value in found.items()}
    return results | fit_apart(strategy)


def train_all(strategy, family, names):
    """Train a linear model in each case; returns this worker's weights after every step."""
    import keras
    import tf_keras

    import tf_redsync as rs

    keras = keras if family == "keras3" else tf_keras
    optimizers = keras.optimizers.legacy if family == "legacy" else keras.optimizers
    results = {}
    for name in names:
        method, momentum, same_inputs = cases(rs)[name]
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Input((12,)), keras.layers.Dense(1, kernel_initializer="zeros")]
            )
            inner = optimizers.SGD(RATE, momentum=momentum)
            if name == "adamw":
                inner = adamw(keras, optimizers)
            optimizer = rs.DistributedOptimizer(inner, method)
            optimizer.build(model.trainable_variables)
        found = train(strategy, model, optimizer, same_inputs)
        results.update({f"{name}/{key}": value for key, value in found.items()})
    if name == "cd_sgd":
        results["left_out"] = apply_partial_gradients(strategy, model, optimizer)
    return results


def adamw(keras, optimizers):
    """The paper's inner optimizer with a warm-up and cosine schedule; Adam in the legacy family."""
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, LENGTH, warmup_target=PEAK, warmup_steps=WARM_UP
    )
    if not hasattr(optimizers, "AdamW"):
        return optimizers.Adam(rate, **ADAMW)
    return optimizers.AdamW(rate, weight_decay=DECAY, **ADAMW)


def apply_partial_gradients(strategy, model, optimizer):
    """Apply a gradient of the first variable only; returns the error text."""
    import tensorflow as tf

    first = model.trainable_variables[:1]

    def replica_step():
        gradients = [tf.zeros(v.shape) for v in first]
        optimizer.apply_gradients(zip(gradients, first, strict=True))

    try:
        tf.function(lambda: strategy.run(replica_step), autograph=False)()
    except ValueError as error:
        return str(error)
    return "nothing"


def train(strategy, model, optimizer, same_inputs):
    import tensorflow as tf

    from tests.distributed import problems

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda x, y: strategy.run(replica_step, (x, y)), autograph=False)
    consensus = optimizer.exchange.consensus

    def flat(variables):
        locals_ = [strategy.experimental_local_results(v)[0] for v in variables]
        return np.concatenate([np.ravel(v.numpy()) for v in locals_])

    steps, agreed, sent = [], [], []
    for x, y in zip(*data_of(problems.rank(), same_inputs), strict=True):
        run(tf.constant(x), tf.constant(y))
        steps.append(flat(consensus.own))
        agreed.append(flat(consensus.agreed))
        sent.append(float(optimizer.exchange.bytes_sent.numpy()))
    optimizer.exchange.to_consensus()
    return {"steps": steps, "agreed": agreed, "sent": sent, "end": flat(consensus.own)}


@pytest.fixture(scope="module")
def trained():
    """Results of both workers."""
    return run_workers(train_everything, args=(TRAINED,), env=LEGACY, timeout=280)


def families_of(name):
    """Parametrizes a test by the families that have trained a case."""
    return pytest.mark.parametrize("family", [f for f, names in TRAINED.items() if name in names])


def of_case(trained, family, name):
    return [
        {key: worker[f"{family}/{name}/{key}"] for key in ("steps", "agreed", "sent", "end")}
        for worker in trained
    ]


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def as_one_block(values, bits):
    """The values after quantization as one block."""
    return quantized(values.astype(np.float32), bits, 32)[2].astype(np.float64)


class Simulated:
    """The same model on all workers in float64: weights `[13]`, kernel and bias."""

    def __init__(self, workers=2, same_inputs=False):
        self.data = [data_of(r, same_inputs) for r in range(workers)]
        self.workers = workers

    def gradient(self, rank, step, w):
        x, y = (a[step].astype(np.float64) for a in self.data[rank])
        error = x @ w[:12, None] + w[12] - y
        return np.append(2 * (x.T @ error).ravel(), 2 * error.sum()) / BATCH

    def local_sgd(self, every):
        agreed = np.zeros(13)
        own = [agreed.copy() for _ in range(self.workers)]
        velocity = [np.zeros(13) for _ in own]
        history = []
        for step in range(STEPS):
            for r in range(self.workers):
                velocity[r] = MOMENTUM * velocity[r] - RATE * self.gradient(r, step, own[r])
                own[r] = own[r] + velocity[r]
            if (step + 1) % every == 0:
                agreed = np.mean(own, axis=0)
                own = [agreed.copy() for _ in own]
            history.append([w.copy() for w in own])
        return history, np.mean(own, axis=0)

    def rounds(self, every, outer, momentum=0.0, inner=None):
        """Local SGD; `outer(pseudo_gradient)` returns the step to subtract at the end of a round.

        As in DiLoCo's algorithm 1, the pseudo-gradient is the weights before the round minus the
        mean of the workers' weights after it.
        """
        agreed = np.zeros(13)
        own = [agreed.copy() for _ in range(self.workers)]
        velocity = [np.zeros(13) for _ in own]
        history = []
        for step in range(STEPS):
            for r in range(self.workers):
                gradient = self.gradient(r, step, own[r])
                if inner is not None:
                    own[r] = inner[r](own[r], gradient)
                    continue
                velocity[r] = momentum * velocity[r] - RATE * gradient
                own[r] = own[r] + velocity[r]
            if (step + 1) % every == 0 or step == STEPS - 1:
                before = [w.copy() for w in own]
                agreed = agreed - outer(agreed - np.mean(own, axis=0))
                own = [agreed.copy() for _ in own]
                if (step + 1) % every:  # the final, shorter round
                    history.append(before)
                    break
            history.append([w.copy() for w in own])
        return history, agreed

    def streaming(self, every, outer, momentum, delay=0, mixing=0.0, bits=None):
        """Kernel and bias in turn, as in algorithm 2 of the paper; `outer()` makes an optimizer.

        A fragment sent after step t arrives after step t + delay. Then the worker's own weights are
        mixed with the consensus. With `bits`, changes are quantized with error feedback; errors of
        fragments that never arrive do not count.
        """
        fragments = [(slice(0, 12), 0, outer()), (slice(12, 13), every // 2, outer())]
        agreed, on_its_way = np.zeros(13), []
        own = [agreed.copy() for _ in range(self.workers)]
        velocity, residual = [np.zeros(13) for _ in own], [np.zeros(13) for _ in own]
        history = []

        def sent(where):
            """The pseudo-gradient that all workers receive, and the new residuals."""
            values = [
                (w[where] - agreed[where]) / self.workers + e[where]
                for w, e in zip(own, residual, strict=True)
            ]
            if bits is None:
                return -sum(values), [np.zeros_like(v) for v in values]
            kept = [as_one_block(v, bits) for v in values]
            return -sum(kept), [v - k for v, k in zip(values, kept, strict=True)]

        for t in range(1, STEPS + 1):
            for r in range(self.workers):
                velocity[r] = momentum * velocity[r] - RATE * self.gradient(r, t - 1, own[r])
                own[r] = own[r] + velocity[r]
            for where, offset, step in fragments:
                if (t - offset) % every == 0:
                    on_its_way.append((t + delay, where, step, *sent(where)))
            for due, where, step, gradient, errors in on_its_way:
                if due == t:
                    agreed[where] -= step(gradient)
                    for w, e, error in zip(own, residual, errors, strict=True):
                        e[where] = error
                        w[where] = mixing * w[where] + (1 - mixing) * agreed[where]
            history.append([w.copy() for w in own])
        for where, _, step in fragments:
            agreed[where] -= step(sent(where)[0])
        return history, agreed

    def sparse(self, every, compressed):
        """Local SGD; `compressed(change, k)` compresses a tensor's change of weights."""
        agreed = np.zeros(13)
        own = [agreed.copy() for _ in range(self.workers)]
        velocity, residual = [np.zeros(13) for _ in own], [np.zeros(13) for _ in own]
        history = []
        for step in range(STEPS):
            for r in range(self.workers):
                velocity[r] = MOMENTUM * velocity[r] - RATE * self.gradient(r, step, own[r])
                own[r] = own[r] + velocity[r]
            if (step + 1) % every == 0:
                total = np.zeros(13)
                for r in range(self.workers):
                    change = residual[r] + (own[r] - agreed) / self.workers
                    kernel, bias = compressed(change[:12], 6), compressed(change[12:], 1)
                    sent = np.concatenate([kernel, bias])
                    residual[r] = change - sent
                    velocity[r][sent != 0] = 0
                    total += sent
                agreed = agreed + total
                own = [agreed.copy() for _ in own]
            history.append([w.copy() for w in own])
        return history

    def cd_sgd(self, momentum):
        """CD-SGD without compression: own weights and consensus after every step."""
        agreed, velocity = np.zeros(13), np.zeros(13)
        own, pending = [agreed.copy() for _ in range(self.workers)], np.zeros(13)
        history, consensus = [], []
        for step in range(STEPS):
            gradients = [self.gradient(r, step, own[r]) for r in range(self.workers)]
            velocity = momentum * velocity - RATE * pending
            agreed = agreed + velocity
            own = [agreed - RATE * g for g in gradients]
            pending = np.mean(gradients, axis=0)
            history.append([w.copy() for w in own])
            consensus.append(agreed.copy())
        return history, consensus

    def synchronous_sgd(self):
        w, history = np.zeros(13), []
        for step in range(STEPS):
            w = w - RATE * np.mean([self.gradient(r, step, w) for r in range(self.workers)], axis=0)
            history.append(w)
        return history


@families_of("local_sgd")
def test_local_sgd_averages_the_weights(trained, family):
    expected, end = Simulated().local_sgd(every=3)
    first, second = of_case(trained, family, "local_sgd")
    for step in range(STEPS):
        for rank, result in enumerate((first, second)):
            assert_near(result["steps"][step], expected[step][rank])
    apart = [not np.array_equal(first["steps"][t], second["steps"][t]) for t in range(STEPS)]
    assert apart == [True, True, False, True, True, False, True]
    assert [s > 0 for s in first["sent"]] == [False, False, True, False, False, True, False]
    np.testing.assert_array_equal(first["end"], second["end"])
    assert_near(first["end"], end)


class NesterovOuter:
    """m <- 0.9 m + gradient;  step = 0.7 (gradient + 0.9 m)."""

    def __init__(self):
        self.m = 0.0

    def __call__(self, gradient):
        self.m = 0.9 * self.m + gradient
        return 0.7 * (gradient + 0.9 * self.m)


class AdamOuter:
    def __init__(self):
        self.m, self.v, self.t = np.zeros(13), np.zeros(13), 0

    def __call__(self, gradient):
        self.t += 1
        b1, b2 = ADAM["beta_1"], ADAM["beta_2"]
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return ADAM["learning_rate"] * m / (np.sqrt(v) + ADAM["epsilon"])


class FallingOuter:
    def __init__(self):
        self.rates = [1.0, 0.5, 0.25, 0.25]

    def __call__(self, gradient):
        return self.rates.pop(0) * gradient


class LocalAdamW:
    """AdamW of one worker with a warm-up and a cosine schedule."""

    def __init__(self, decay):
        self.m, self.v, self.t, self.decay = np.zeros(13), np.zeros(13), 0, decay

    def __call__(self, w, gradient):
        rate = PEAK * self.t / WARM_UP
        if self.t > WARM_UP:
            rate = PEAK * (1 + np.cos(np.pi * (self.t - WARM_UP) / LENGTH)) / 2
        self.t += 1
        b1, b2 = ADAMW["beta_1"], ADAMW["beta_2"]
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        # Keras adds epsilon before the bias correction of the second moment.
        step = self.m / (1 - b1**self.t) * np.sqrt(1 - b2**self.t)
        return w - rate * self.decay * w - rate * step / (np.sqrt(self.v) + ADAMW["epsilon"])


@families_of("adamw")
def test_each_worker_has_own_inner_optimizer(trained, family):
    inner = [LocalAdamW(0.0 if family == "legacy" else DECAY) for _ in range(2)]
    expected, end = Simulated().rounds(3, NesterovOuter(), inner=inner)
    results = of_case(trained, family, "adamw")
    for step in range(STEPS):
        for rank, result in enumerate(results):
            assert_near(result["steps"][step], expected[step][rank])
    np.testing.assert_array_equal(results[0]["end"], results[1]["end"])
    assert_near(results[0]["end"], end)


OUTERS = {
    "diloco": (3, NesterovOuter, MOMENTUM),
    "outer_adam": (2, AdamOuter, 0.0),
    "outer_rate": (2, FallingOuter, 0.0),
}


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, names in TRAINED.items() for n in OUTERS if n in names]
)
def test_outer_optimizer_updates_weights(trained, family, name):
    every, outer, momentum = OUTERS[name]
    expected, end = Simulated().rounds(every, outer(), momentum)
    results = of_case(trained, family, name)
    for step in range(STEPS):
        for rank, result in enumerate(results):
            assert_near(result["steps"][step], expected[step][rank])
    np.testing.assert_array_equal(results[0]["end"], results[1]["end"])
    assert_near(results[0]["end"], end)


@pytest.mark.deep
@families_of("one_fragment")
def test_one_fragment_without_delay_is_diloco(trained, family):
    for found, expected in zip(
        of_case(trained, family, "one_fragment"), of_case(trained, family, "diloco"), strict=True
    ):
        np.testing.assert_array_equal(found["steps"], expected["steps"])
        np.testing.assert_array_equal(found["end"], expected["end"])
        np.testing.assert_array_equal(found["sent"], expected["sent"])


STREAMED = {
    "fragments": ((4, NesterovOuter, MOMENTUM), [0, 1, 0, 12, 0, 1, 0]),
    "late": ((4, NesterovOuter, MOMENTUM, 2, 0.25), [0, 0, 1, 0, 12, 0, 1]),
    "late_mean": ((2, lambda: lambda gradient: gradient, 0.0, 1), [0, 1, 12, 1, 12, 1, 12]),
    # A flag, a scale, 32 codes of 4 bits.
    "in_blocks": ((4, NesterovOuter, MOMENTUM, 0, 0.0, 4), [0, 6, 0, 6, 0, 6, 0]),
    "late_in_blocks": ((4, NesterovOuter, MOMENTUM, 2, 0.25, 4), [0, 0, 6, 0, 6, 0, 6]),
}


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, names in TRAINED.items() for n in STREAMED if n in names]
)
def test_fragments_are_exchanged_in_turn(trained, family, name):
    arguments, sent = STREAMED[name]
    expected, end = Simulated().streaming(*arguments)
    results = of_case(trained, family, name)
    for step in range(STEPS):
        for rank, result in enumerate(results):
            assert_near(result["steps"][step], expected[step][rank])
    for result in results:  # between two workers an all-reduce of float32 sends as much
        np.testing.assert_array_equal(result["sent"], 4.0 * np.array(sent))
    np.testing.assert_array_equal(results[0]["end"], results[1]["end"])
    assert_near(results[0]["end"], end)


@pytest.mark.deep
@families_of("one_step")
def test_rounds_of_one_step_are_synchronous_sgd(trained, family):
    first, _ = of_case(trained, family, "one_step")
    assert_near(first["steps"], Simulated().synchronous_sgd())


@families_of("post_local")
def test_post_local_sgd_begins_synchronously(trained, family):
    first, second = of_case(trained, family, "post_local")
    assert_near(first["steps"][:3], Simulated().synchronous_sgd()[:3])
    apart = [not np.array_equal(first["steps"][t], second["steps"][t]) for t in range(STEPS)]
    assert apart == [False, False, False, True, False, True, False]


def signed_mean(change, k):
    """The k largest magnitudes, each replaced by its sign times their mean."""
    chosen = np.argsort(-np.abs(change), kind="stable")[:k]
    sent = np.zeros_like(change)
    sent[chosen] = np.sign(change[chosen]) * np.abs(change[chosen]).mean()
    return sent


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, name) for f, names in TRAINED.items() for name in names if name in ("sbc", "coded_topk")],
)
def test_residual_is_kept_and_momentum_cleared(trained, family, name):
    compressed = {"sbc": binarized, "coded_topk": signed_mean}[name]
    expected = Simulated().sparse(every=2, compressed=compressed)
    first, second = of_case(trained, family, name)
    for step in range(STEPS):
        for rank, result in enumerate((first, second)):
            assert_near(result["steps"][step], expected[step][rank])
    np.testing.assert_array_equal(first["end"], second["end"])


@families_of("cd_sgd")
def test_cd_sgd_corrects_delay(trained, family):
    own, agreed = Simulated().cd_sgd(MOMENTUM)
    first, second = of_case(trained, family, "cd_sgd")
    for step in range(STEPS):
        for rank, result in enumerate((first, second)):
            assert_near(result["steps"][step], own[step][rank])
            assert_near(result["agreed"][step], agreed[step])
    np.testing.assert_array_equal(first["agreed"], second["agreed"])
    for result in (first, second):
        np.testing.assert_array_equal(result["end"], first["agreed"][-1])


@pytest.mark.deep
@families_of("quadratic")
def test_cd_sgd_is_synchronous_sgd_on_a_quadratic(trained, family):
    """The consensus follows the same trajectory, one step behind."""
    first, _ = of_case(trained, family, "quadratic")
    assert_near(first["agreed"][1:], Simulated(same_inputs=True).synchronous_sgd()[:-1])


@families_of("cd_sgd")
def test_delay_with_changing_variables_raises(trained, family):
    for worker in trained:
        text = worker[f"{family}/left_out"]
        assert "all steps must have gradients of the same variables" in text and "bias" in text


@families_of("warm_up")
def test_cd_sgd_begins_synchronously(trained, family):
    first, second = of_case(trained, family, "warm_up")
    assert_near(first["agreed"][:2], Simulated().synchronous_sgd()[:2])
    np.testing.assert_array_equal(first["steps"][:2], first["agreed"][:2])
    np.testing.assert_array_equal(first["agreed"][2], first["agreed"][1])  # nothing is pending yet
    assert not np.array_equal(first["agreed"][3], first["agreed"][2])
    assert not np.array_equal(first["steps"][2], second["steps"][2])
    np.testing.assert_array_equal(first["agreed"], second["agreed"])


def fit_apart(strategy):
    """Fit with BatchNormalization, validation and checkpoints while workers' weights differ."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    digests = {"validated": [], "epoch": []}

    class Digest(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            digests["validated"].append(problems.digest(self.model))

        def on_epoch_end(self, epoch, logs=None):
            digests["epoch"].append(problems.digest(self.model))

    results = {}
    methods = {
        "sbc": rs.SBC(steps=3, density=0.3, dense_below=16),
        "cd_sgd": rs.CDSGD(warm_up=None, dense_below=16),
    }
    for name in FITTED:
        method = methods[name]
        digests["validated"], digests["epoch"] = [], []
        with strategy.scope():
            model = problems.network(keras, normalized=True)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.5), method)
            model.compile(optimizer=optimizer, loss="mse")
        train, test = problems.dataset(112, 16).repeat(3), problems.dataset(32, 16)
        history = model.fit(train, validation_data=test, epochs=2, verbose=0, callbacks=[Digest()])
        norm = model.layers[1]
        local = strategy.experimental_local_results(norm.moving_mean.value)[0]
        weights = [strategy.experimental_local_results(v.value)[0] for v in model.weights]
        own = float(sum(tf.reduce_sum(tf.abs(w)) for w in weights))
        results[f"{name}/loss"] = history.history["loss"]
        results[f"{name}/val_loss"] = history.history["val_loss"]
        results[f"{name}/moving_mean"] = local.numpy()
        results[f"{name}/own"] = own
        results[f"{name}/validated"] = digests["validated"]
        results[f"{name}/epoch"] = digests["epoch"]
        # Weights loaded between two calls of `fit` are the start of the next one.
        results[f"{name}/norm before"] = float(
            sum(np.abs(w).sum() for w in model.get_weights()[:2])
        )
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        model.fit(train, epochs=1, steps_per_epoch=1, verbose=0)
        results[f"{name}/norm"] = float(sum(np.abs(w).sum() for w in model.get_weights()[:2]))
        results[f"{name}/bytes"] = model.optimizer.bytes_per_step()
    return results


def test_fit_evaluates_and_ends_at_consensus(trained):
    first, second = trained
    for name in FITTED:
        loss = first[f"{name}/loss"]
        assert np.isfinite(loss).all() and loss[-1] < 0.7 * loss[0]
        assert len(set(first[f"{name}/validated"])) == 2
        for key in ("val_loss", "moving_mean", "own", "validated", "epoch", "bytes"):
            found = first[f"{name}/{key}"]
            np.testing.assert_array_equal(found, second[f"{name}/{key}"], f"{name}/{key}")
        assert np.abs(first[f"{name}/moving_mean"]).max() > 0
        assert first[f"{name}/norm"] < 0.1 * first[f"{name}/norm before"]
