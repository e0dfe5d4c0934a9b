"""A non-finite step changes only the counters, for every inner optimizer."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.loops import loop
from tests.optimizers import has_muon
from tf_redsync.network.collectives import Alone
from tf_redsync.step.nonfinite import NonFiniteCounter

SHAPES = ((8, 6), (6,))
LEGACY = tf_keras.optimizers.legacy
# Unlike a projection, this constraint changes the weights on every application.
SHRINK = 0.9


def _addons(name, *args):
    return getattr(rs.addons.load().optimizers, name)(*args)


OPTIMIZERS = {
    "keras decay": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.5),
    "keras adam": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=1.0),
    "keras ema": lambda: keras.optimizers.Adam(0.1, weight_decay=0.1, use_ema=True),
    "keras overwritten": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "keras muon": lambda: keras.optimizers.Muon(0.1, weight_decay=0.2, adam_weight_decay=0.2),
    "keras scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, weight_decay=0.5, use_ema=True), initial_scale=1.0
    ),
    "keras nadam": lambda: keras.optimizers.Nadam(0.1, weight_decay=0.1),
    "keras schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), weight_decay=0.5
    ),
    "tf_keras decay": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.5),
    "tf_keras adam": lambda: tf_keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "tf_keras ema": lambda: tf_keras.optimizers.Adam(
        0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "legacy": lambda: LEGACY.Adam(0.1, decay=0.5),
    "legacy nadam": lambda: LEGACY.Nadam(0.1),
    "addons sgdw": lambda: _addons("SGDW", 0.2, 0.1),
    "addons adamw": lambda: _addons("AdamW", 0.2, 0.1),
    "addons average": lambda: _addons("MovingAverage", LEGACY.SGD(0.1, momentum=0.9)),
    "addons lookahead": lambda: _addons("Lookahead", LEGACY.Nadam(0.1), 2),
}
if not has_muon():
    del OPTIMIZERS["keras muon"]


class Shrink(keras.constraints.Constraint):
    """Shrinks weights."""

    def __call__(self, w):
        return w * SHRINK


class Training:
    """Two variables with a constraint and a wrapped optimizer; steps with given gradients."""

    def __init__(self, name, strategy, method=None):
        shrink = Shrink()
        with strategy.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            rng = np.random.default_rng(1)
            values = [rng.standard_normal(s).astype("float32") for s in SHAPES]
            if name.startswith("keras"):
                self.variables = [keras.Variable(v, name=f"v{i}") for i, v in enumerate(values)]
                self.variables[0].constraint = shrink
            else:
                self.variables = [
                    tf.Variable(v, constraint=None if i else shrink) for i, v in enumerate(values)
                ]
            self.inner = OPTIMIZERS[name]()
            self.optimizer = self.inner
            if method is not None:
                self.optimizer = rs.DistributedOptimizer(self.inner, method)
            if name.startswith(("keras", "tf_keras")) or method is not None:
                self.optimizer.build(self.variables)
        self.strategy, self.replicas = strategy, strategy.num_replicas_in_sync

        @tf.function
        def run(*grads):
            def replica(*own):
                if name == "keras scaled":
                    own = [g * self.optimizer.scale_loss(1.0) for g in own]
                self.optimizer.apply_gradients(zip(own, self.variables, strict=True))

            strategy.run(replica, args=grads)

        self.run = run

    def step(self, number, bad=False):
        """Runs one step; if `bad`, the last replica's gradient has a NaN."""

        def value(context, i):
            replica = context.replica_id_in_sync_group
            grad = np.random.default_rng([number, replica, i]).standard_normal(SHAPES[i])
            if bad and replica == self.replicas - 1:
                grad.flat[3] = np.nan
            return tf.constant(grad.astype("float32"))

        distribute = self.strategy.experimental_distribute_values_from_function
        self.run(*(distribute(lambda c, i=i: value(c, i)) for i in range(len(SHAPES))))

    def state(self):
        """Returns the state except the counters of skipped steps and of the loss scale."""
        listed = self.inner.variables() if callable(self.inner.variables) else self.inner.variables
        found = {
            str(i): np.asarray(tf.convert_to_tensor(v))
            for i, v in enumerate([*self.variables, *listed])
            if not getattr(v, "path", v.name).endswith(("step_counter", "dynamic_scale"))
        }
        if self.optimizer is not self.inner:
            state = total_state.total(self.optimizer.exchange)
            found |= {n: v for n, v in state.items() if n not in ("step", "skipped")}
        return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def default_strategy():
    return tf.distribute.get_strategy()


@loop("name", OPTIMIZERS)
def test_nonfinite_steps_change_no_state(name):
    """A run with non-finite steps equals one of the plain optimizer without them."""
    with_bad = Training(name, default_strategy(), rs.Dense())
    before = with_bad.state()
    with_bad.step(7, bad=True)
    assert_same(with_bad.state(), before)
    plain = Training(name, default_strategy())
    for number in range(3):
        with_bad.step(number)
        with_bad.step(7, bad=True)
        plain.step(number)
    unwrapped, wrapped = plain.state(), with_bad.state()
    assert len(unwrapped) >= len(SHAPES)  # the exchange, dense on one worker, has no other state
    assert_same({n: v for n, v in wrapped.items() if n in unwrapped}, unwrapped)


@pytest.mark.parametrize(
    "name",
    ["keras ema", "keras scaled", "keras nadam", "tf_keras adam", "legacy nadam", "addons adamw"],
)
def test_nonfinite_step_of_one_replica_changes_no_state(name, mirrored):
    method = rs.RedSync(density=0.2, dense_below=0, momentum=0.0)
    training = Training(name, mirrored(2), method)
    for number in range(3):
        training.step(number)
        before = training.state()
        training.step(7, bad=True)
        assert_same(training.state(), before)
    assert training.optimizer.exchange.skipped.numpy() == 3


# ------------------------------------------------------------------------ warnings and errors


def train(optimizer, variable, grads, strategy=None):
    strategy = strategy or default_strategy()

    @tf.function
    def step(*own):
        strategy.run(lambda *g: optimizer.apply([tf.stack(g)], [variable]), args=own)

    for grad in grads:
        step(*grad)


def build_optimizer(strategy, inner=None, **options):
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        variable = keras.Variable(np.ones(2, "float32"), name="kernel")
        optimizer = rs.DistributedOptimizer(
            inner or keras.optimizers.SGD(0.1), rs.Dense(), **options
        )
        optimizer.build([variable])
    return optimizer, variable


def last_replica_gradients(strategy, bad):
    """Returns the gradients of steps `bad` that the last replica alone has."""
    last = strategy.num_replicas_in_sync - 1
    distribute = strategy.experimental_distribute_values_from_function
    return [
        [
            distribute(
                lambda c, b=b: tf.constant(
                    np.nan if b and c.replica_id_in_sync_group == last else 1.0
                )
            ),
            distribute(lambda c: tf.constant(1.0)),
        ]
        for b in bad
    ]


@pytest.mark.parametrize("replicas", [0, 2])
def test_ten_skipped_steps_in_a_row_warn(caplog, replicas, mirrored):
    strategy = mirrored(replicas) if replicas else default_strategy()
    optimizer, variable = build_optimizer(strategy)
    train(
        optimizer,
        variable,
        last_replica_gradients(strategy, 9 * [True] + [False] + 9 * [True]),
        strategy,
    )
    assert not caplog.records
    train(optimizer, variable, last_replica_gradients(strategy, 3 * [True]), strategy)
    assert int(optimizer.exchange.skipped.numpy()) == 21
    messages = [r.getMessage() for r in caplog.records]
    assert any(
        "10 steps in a row were skipped" in t
        and f"worker {max(replicas - 1, 0)} in the gradient of 'kernel'" in t
        for t in messages
    ), messages


def test_first_nonfinite_variable_is_named(caplog):
    with default_strategy().scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        names = ("embedding", "kernel", "bias")
        variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in names]
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
        optimizer.build(variables)
    step = tf.function(lambda *grads: optimizer.apply(list(grads), variables))
    for _ in range(10):
        step(tf.ones(2), tf.constant([1.0, np.inf]), tf.constant([np.nan, 1.0]))
    (message,) = [r.getMessage() for r in caplog.records]
    assert "First seen on worker 0 in the gradient of 'kernel'." in message


def test_updates_above_31_bits_stay_equal():
    iterations = tf.Variable(2**31 + 5, dtype=tf.int64)
    counter, network = NonFiniteCounter(["kernel"], Alone(), 0), Alone()
    counter.store_counts(iterations)
    counter.exchange_counts(network)
    counter.count_round(tf.constant(True), [tf.zeros([2])], iterations)
    assert int(iterations.numpy()) == 2**31 + 5 and int(counter.total.numpy()) == 0


def test_variable_of_a_frozen_model_is_named(caplog):
    """`LossScaleOptimizer` checks the gradients of the variables that are not frozen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in "abc"]
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer = rs.DistributedOptimizer(inner, rs.Dense())
        optimizer.build(variables)
    step = tf.function(lambda *grads: optimizer.apply(list(grads), variables[1:]))
    for _ in range(10):
        step(tf.ones(2), tf.constant([1.0, np.inf]))
    (message,) = [r.getMessage() for r in caplog.records]
    assert "First seen on worker 0 in the gradient of 'c'." in message


def test_overflowing_sum_is_not_attributed_to_a_worker(caplog, mirrored):
    strategy = mirrored(2)
    optimizer, variable = build_optimizer(strategy)
    train(optimizer, variable, 10 * [[tf.constant(3e38), tf.constant(1.0)]], strategy)
    assert int(optimizer.exchange.skipped.numpy()) == 10
    assert caplog.records
    for record in caplog.records:
        assert "Each worker's own gradients are finite" in record.getMessage()


@pytest.mark.parametrize("scaled", [False, True], ids=["exchange", "loss scale"])
def test_too_many_skipped_steps_in_a_row_raise(scaled):
    inner = keras.optimizers.SGD(0.1)
    if scaled:
        inner = keras.optimizers.LossScaleOptimizer(inner)
    optimizer, variable = build_optimizer(default_strategy(), inner, max_skipped_steps=4)
    steps = last_replica_gradients(default_strategy(), 10 * [True])
    train(optimizer, variable, steps[:3])
    with pytest.raises(tf.errors.OpError, match="4 steps in a row.*'kernel'.*max_skipped_steps=4"):
        train(optimizer, variable, steps[:1])
    with pytest.raises(tf.errors.OpError, match="5 steps in a row"):  # in a later `fit`
        train(optimizer, variable, steps[:1])
    assert int(optimizer.exchange.skipped.numpy()) == 5
    for never in (0, None):
        optimizer, variable = build_optimizer(default_strategy(), max_skipped_steps=never)
        train(optimizer, variable, steps * 11)
        assert int(optimizer.exchange.skipped.numpy()) == 110
    assert optimizer.get_config()["max_skipped_steps"] is None


def test_eager_steps_of_one_worker_use_no_memory():
    strategy = rs.MultiWorkerMirroredStrategy()
    optimizer, variable = build_optimizer(strategy)
    for _ in range(3):
        strategy.run(lambda: optimizer.apply([tf.ones(2)], [variable]))
        assert len(strategy.skip_conditions) == 1


@pytest.mark.parametrize("value", [-1, 1.5, "many", True])
def test_bad_limit(value):
    with pytest.raises(ValueError, match="`max_skipped_steps` must be an integer >= 0"):
        rs.DistributedOptimizer(keras.optimizers.SGD(), rs.Dense(), max_skipped_steps=value)


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_fit_logs(family, tmp_path, capfd):
    model = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(family.optimizers.SGD(0.1), rs.Dense()), "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    x[2] = np.nan
    log = tmp_path / "log.csv"
    for data in (x, np.ones_like(x)):
        history = model.fit(
            data, y, epochs=2, batch_size=2, shuffle=False, verbose=2,
            callbacks=[family.callbacks.CSVLogger(log)],
        )  # fmt: skip
        expected = 1 if data is x else 0
        assert history.history["skipped_steps"] == [expected, expected]
        assert "skipped_steps" in log.read_text().splitlines()[0]
        assert capfd.readouterr().out.count("skipped_steps: 1.0000") == 2 * expected


@pytest.mark.parametrize(("swapped", "scaled"), [(False, False), (True, False), (True, True)])
def test_averages_overwrite_the_weights_at_the_end_of_fit(swapped, scaled):
    """The step guard does not affect Keras's updates outside a step."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    if scaled:
        inner = keras.optimizers.LossScaleOptimizer(inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.compile(rs.DistributedOptimizer(inner, rs.TopK(density=0.5)), loss="mse")
        x = np.ones((8, 3), np.float32)
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if swapped else []
        model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=callbacks)
    average = next(v for v in inner.variables if "average" in v.path)
    np.testing.assert_array_equal(average.numpy(), model.get_weights()[0])


@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize("frozen", [0, 1])
def test_averages_overwrite_the_weights_that_are_not_frozen(frozen, replicas, mirrored):
    strategy = mirrored(replicas) if replicas else default_strategy()
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        layers = [keras.layers.Dense(3, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        model.compile(rs.DistributedOptimizer(inner, rs.Dense()), "mse")
    x = np.random.default_rng(0).standard_normal((8, 3)).astype("float32")
    model.fit(x, x, batch_size=4, verbose=0)
    layers[frozen].trainable = False
    own = np.full((3, 3), 0.5, "float32")
    layers[frozen].set_weights([own])
    model.compile(model.optimizer, "mse")
    model.fit(x, x, batch_size=4, verbose=0)
    averages = [v.numpy() for v in inner.variables if "average" in v.path]
    trained = 1 - frozen
    np.testing.assert_array_equal(layers[trained].get_weights()[0], averages[trained])
    np.testing.assert_array_equal(layers[frozen].get_weights()[0], own)
    assert np.abs(averages[frozen] - averages[trained]).max() > 0.01
