"""`Auto` on two real workers: all families build it, the trial keeps or drops compression."""

import functools

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers
from tests.distributed.resuming import library

RATE = 0.02  # of trainings with `fit`
LEARNING_RATE = 0.01  # of trials
STEPS = 15
FAMILIES = ("keras3", "tf_keras") if DEEP else ("keras3",)


def fit_with_auto(family, strategy=None):
    """Fit a small model with the default method, and with a dense exchange, from one seed.

    The network is measured and then replaced by a fast one: on a busy machine a latency of
    milliseconds may be measured for one collective only.
    """

    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.auto import cost, probe

    if strategy is None:
        strategies = tf.distribute if family == "tf_keras" else rs
        strategy = strategies.MultiWorkerMirroredStrategy()
    if family == "keras3":
        import keras
    else:
        import tf_keras as keras
    sgd = keras.optimizers.legacy.SGD if family == "legacy" else keras.optimizers.SGD

    measure = probe.link

    def measured(network):
        assert measure(network).all_reduce.rate > 0.0
        return cost.Link.of(rate=1e9, latency=1e-4)

    def fit(method):
        with strategy.scope(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(probe, "link", measured)
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(sgd(RATE), method)
            optimizer.build(model.trainable_variables)
            model.compile(optimizer=optimizer, loss="mse")
        model.fit(problems.dataset(128, 16), epochs=1, verbose=0)
        return model

    auto, dense = fit(None), fit(rs.Dense())
    return {
        "auto": np.concatenate([w.ravel() for w in auto.get_weights()]),
        "dense": np.concatenate([w.ravel() for w in dense.get_weights()]),
        "table": str(auto.optimizer.exchange.resolved),
        "methods": [row.method for row in auto.optimizer.explain().rows],
    }


def assert_dense(first, second):
    for result in (first, second):
        np.testing.assert_array_equal(result["auto"], result["dense"])
    assert first["table"] == second["table"]
    assert "2 workers" in first["table"] and "MB/s" in first["table"]
    assert "CodedTopK ms" in first["table"]
    assert set(first["methods"]) == {"Dense"}


@pytest.mark.deep
@pytest.mark.parametrize("family", ["tf_keras", "legacy"])
def test_small_model_stays_dense_in_other_families(family):
    assert_dense(*run_workers(fit_with_auto, args=(family,), env=LEGACY, timeout=240))


def train_with_trials(trials):
    """Train a small model, then run each trial; results are keyed by the trial's number."""
    import tf_redsync as rs
    from tf_redsync.auto import probe

    measure = probe.work
    strategy = rs.MultiWorkerMirroredStrategy()
    found = {f"small/{key}": value for key, value in fit_with_auto("keras3", strategy).items()}
    for number, (slow_phase, *options) in enumerate(trials):
        results = train_with_trial(strategy, slow_phase, *options)
        found |= {f"{number}/{key}": value for key, value in results.items()}
    probe.work = functools.cache(measure)
    found |= {"failed": measure_with_failure(strategy)}
    return found | train_with_moved_momentum(strategy)


def measure_with_failure(strategy):
    """Build with `Auto` where worker 1 cannot measure a method; returns the error."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.auto import probe

    def fail(*_):
        raise ValueError("no memory for the gradients")

    with strategy.scope(), pytest.MonkeyPatch.context() as patched:
        if problems.rank() == 1:
            patched.setattr(probe, "work", fail)
        model = problems.network(keras)
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1))
        try:
            optimizer.build(model.trainable_variables)
        except (ValueError, rs.DistributedError) as error:
            return f"{type(error).__name__}: {error}"


def train_with_moved_momentum(strategy):
    """Plain SGD whose momentum moves to the exchange, where compression always wins."""
    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.auto import cost, probe

    probe.link = lambda *_: cost.Link.of(rate=1e3, latency=0.0)

    def fit(keras, method, momentum, dense=False, state=None):
        with strategy.scope():
            model = problems.network(keras)
            sgd = keras.optimizers.SGD(RATE, momentum=momentum)
            optimizer = rs.DistributedOptimizer(sgd, method)
            optimizer.build(model.trainable_variables)
            model.compile(optimizer, "mse")
        if dense:
            optimizer.disable()
        if state is not None:
            optimizer.exchange.restore_worker_states([state])
        model.fit(problems.dataset(128, 16), epochs=1, verbose=0)
        return model, np.concatenate([w.ravel() for w in model.get_weights()])

    found = {}
    for name in FAMILIES:
        keras = library(name)
        model, moved = fit(keras, None, 0.9)
        optimizer = model.optimizer
        found[f"{name}/methods"] = sorted({r.method for r in optimizer.explain().rows})
        config = optimizer.get_config()["inner_optimizer"]["config"]
        found[f"{name}/kept"] = [float(optimizer.momentum), float(config["momentum"])]
        found[f"{name}/moved"] = moved
        found[f"{name}/exchanged"] = fit(keras, rs.Auto(momentum=0.9), 0.0)[1]
        found[f"{name}/dense"] = fit(keras, None, 0.9, dense=True)[1]
        found[f"{name}/plain"] = fit(keras, rs.Dense(), 0.9)[1]
    saved = optimizer.exchange.worker_state()
    probe.link = lambda *_: cost.Link.of(rate=1e12, latency=0.0)
    again, _ = fit(library(FAMILIES[-1]), None, 0.9, state=saved)
    found["resumed/methods"] = sorted({r.method for r in again.optimizer.explain().rows})
    return found


def train_with_trial(strategy, slow_phase, bad=None, applies=1):
    """Train with `Auto` and a method with one slow phase; the loss is linear in the weights.

    Gradients therefore do not depend on the weights, and the weights show the sum of the delivered
    gradients. `bad` lists steps in which a gradient of worker 1 overflows; a `LossScaleOptimizer`
    skips them before the exchange. Each step applies its gradient `applies` times.
    """
    import dataclasses
    import time

    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.auto import cost, decision, probe

    def sleep(tensors):
        def wait(value):
            time.sleep(0.1)
            return value

        return [tf.ensure_shape(tf.py_function(wait, [t], t.dtype), t.shape) for t in tensors]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class SlowTopK(rs.TopK):
        def exchange(self, grads, state, ctx):
            grads = sleep(grads) if slow_phase == "exchange" else grads
            return (yield from super().exchange(grads, state, ctx))

        def dense_exchange(self, grads, state, ctx):
            grads = sleep(grads) if slow_phase == "dense_exchange" else grads
            return (yield from super().dense_exchange(grads, state, ctx))

    # On this network every method is predicted to win, so clearly that there would be no trial.
    probe.link = lambda *_: cost.Link.of(rate=1e3, latency=0.0)
    probe.work = lambda *_: cost.Work(0.0, 0.0, 0.0)
    decision.CERTAIN = 0.0
    auto = rs.Auto(candidates=(SlowTopK(density=0.01, dense_below=0),), trial_steps=3)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(48, use_bias=False)])
        inner = keras.optimizers.SGD(LEARNING_RATE)
        if bad is not None:
            inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
        optimizer = rs.DistributedOptimizer(inner, auto)
        optimizer.build(model.trainable_variables)
    (kernel,) = model.trainable_variables
    start = kernel.numpy()
    steps = STEPS + len(bad or ())
    data = np.random.RandomState(problems.rank()).randn(steps, 12, 48).astype("float32")

    @tf.function
    def step(gradient):
        def on_replica():
            for _ in range(applies):
                optimizer.apply([tf.identity(gradient)], [kernel])

        strategy.run(on_replica)

    sent = []
    for number, gradient in enumerate(data):
        skipped = number in (bad or ())
        scale = 1.0 if bad is None else float(inner.dynamic_scale.numpy())
        if skipped and problems.rank() == 1:
            scale = np.inf
        step(tf.constant(gradient * scale))
        if not skipped:
            sent.append(float(optimizer.exchange.bytes_sent.numpy()))
    data = np.delete(data, bad or (), axis=0)
    residual = optimizer.exchange.states[0].variables_by_name["residual"][0]
    local = strategy.experimental_local_results(residual)[0].numpy()
    return {
        "moved": (start - kernel.numpy()) / LEARNING_RATE,
        "gradients": applies * data.sum(axis=0),
        "sent": np.array(sent),
        "bytes_per_step": optimizer.bytes_per_step(),
        "residual": local,
        "table": str(optimizer.exchange.resolved),
        "skipped": int(optimizer.exchange.skipped.numpy()),
    }


def check_trial(first, second, phases="ccccdcdcd"):
    """Checks that phases alternate and no gradient is lost; returns the phases after the trial."""
    assert "SlowTopK" in first["table"] and first["table"] == second["table"]
    np.testing.assert_array_equal(first["moved"], second["moved"])
    delivered = first["gradients"] + second["gradients"] - first["residual"] - second["residual"]
    np.testing.assert_allclose(first["moved"], delivered, rtol=1e-3, atol=1e-3)
    dense = first["sent"] > 1000  # 576 elements of 4 bytes, against 6 of 8 bytes and a header
    assert "".join("d" if d else "c" for d in dense[: len(phases)]) == phases
    return dense[len(phases) :]


def assert_fallback(first, second):
    """Checks that the exchange is dense for good and has delivered the residuals."""
    assert not first["residual"].any() and not second["residual"].any()
    assert first["bytes_per_step"] == 576 * 4


BAD = (2, 6, 9)  # in the first steps, after a compressed step, and after a dense one
TWICE = ("dense_exchange", None, 2)
TRIALS = [("dense_exchange", None), TWICE, ("exchange", BAD)]
TRIALS += [("exchange", None), ("dense_exchange", BAD)] if DEEP else []


@pytest.fixture(scope="module")
def workers():
    return run_workers(train_with_trials, args=(TRIALS,), timeout=240)


def of_part(workers, part):
    return [
        {k.split("/")[1]: v for k, v in worker.items() if k.startswith(f"{part}/")}
        for worker in workers
    ]


@pytest.fixture(scope="module")
def trial_results(workers):
    """Results of both workers by slow phase and bad steps."""
    return {trial: of_part(workers, number) for number, trial in enumerate(TRIALS)}


def test_small_model_stays_dense(workers):
    assert_dense(*of_part(workers, "small"))


def test_failed_measurement_raises_on_all_workers(workers):
    """Worker 0 would otherwise wait for worker 1's measurements."""
    assert workers[1]["failed"] == "ValueError: no memory for the gradients"
    assert workers[0]["failed"].startswith("DistributedError: worker 1 failed at: measure the me")
    assert workers[0]["failed"].endswith("ValueError: no memory for the gradients")


@pytest.mark.deep
def test_trial_falls_back_to_dense(trial_results):
    first, second = trial_results["exchange", None]
    assert check_trial(first, second).all()
    assert_fallback(first, second)


def test_trial_keeps_compression(trial_results):
    first, second = trial_results["dense_exchange", None]
    assert not check_trial(first, second).any()
    assert first["residual"].any()
    assert first["bytes_per_step"] < 100


def test_trial_of_an_optimizer_that_is_applied_twice_a_step(trial_results):
    assert not check_trial(*trial_results[TWICE]).any()


@pytest.mark.parametrize("slow_phase", [phase for phase, bad, *_ in TRIALS if bad])
def test_trial_with_a_loss_scale_that_overflows(trial_results, slow_phase):
    """A step before a skipped one has no time; the trial repeats it."""
    first, second = trial_results[slow_phase, BAD]
    left = check_trial(first, second, "ccccccddcdcd")
    assert left.all() == (slow_phase == "exchange") and left.any() == left.all()
    if slow_phase == "exchange":
        assert_fallback(first, second)
    assert first["skipped"] == second["skipped"] == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_momentum_of_plain_sgd_moves_to_exchange(workers, family):
    """The momentum is applied once: by the exchange if compressed, by Keras if dense."""
    first, second = of_part(workers, family)
    np.testing.assert_array_equal(first["moved"], second["moved"])
    assert "CodedGMC" in first["methods"]
    np.testing.assert_allclose(first["kept"], [0.9, 0.9])  # shown to users and saved in files
    # Equal bits: both updates take sparse totals
    np.testing.assert_array_equal(first["moved"], first["exchanged"])
    np.testing.assert_allclose(first["dense"], first["plain"], rtol=1e-4, atol=1e-6)
    without = workers[0]["small/dense"]  # the same training without momentum, in Keras 3
    assert np.abs(first["plain"] - without).max() > 1e-3


def test_resumed_run_keeps_momentum_in_exchange(workers):
    """Even on a network where the resumed run would choose dense exchanges."""
    assert all("CodedGMC" in worker["resumed/methods"] for worker in workers)
