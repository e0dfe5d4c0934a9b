"""DistributedOptimizer rejects unsupported arguments, and names argument and value."""

import copy
import inspect
import typing
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tests.optimizers import needs

FAMILIES = {
    "keras": keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "legacy": tf_keras.optimizers.legacy,
}
every_family = loop("family", FAMILIES)


def assert_raises(kind, make, *words):
    with pytest.raises(kind) as error:
        make()
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("value", [None, 0.1, keras.optimizers.SGD, object()])
def test_not_an_optimizer(value):
    assert_raises(
        TypeError,
        lambda: rs.DistributedOptimizer(value, rs.Dense()),
        "`optimizer` must be an optimizer of keras",
        f"optimizer={value!r}",
    )


@loop(
    ("given", "legacy", "kind"),
    [
        ("adam", False, keras.optimizers.Adam),
        ("SGD", False, keras.optimizers.SGD),
        (keras.optimizers.serialize(keras.optimizers.Lamb(0.3)), False, keras.optimizers.Lamb),
        ({"class_name": "Adam", "config": {"learning_rate": 0.3}}, False, keras.optimizers.Adam),
        ("adam", True, tf_keras.optimizers.Adam),
        (tf_keras.optimizers.serialize(tf_keras.optimizers.Lion(0.3)), True, None),
    ],
)
def test_names_and_configs_follow_keras(monkeypatch, given, legacy, kind):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1" if legacy else "0")
    before = copy.deepcopy(given)
    wrapper = rs.DistributedOptimizer(given, rs.Dense())
    assert type(wrapper.inner_optimizer) is (kind or tf_keras.optimizers.Lion)
    assert given == before
    if isinstance(given, dict):
        np.testing.assert_allclose(float(wrapper.learning_rate), 0.3, rtol=1e-6)


@pytest.mark.parametrize(
    "value",
    ["sgdd", {}, {"class_name": "Nope", "config": {}}, {"class_name": 3, "config": {}}],
)
def test_unknown_optimizer_name(monkeypatch, value):
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    assert_raises(
        ValueError,
        lambda: rs.DistributedOptimizer(value, rs.Dense()),
        "`optimizer`",
        "keras.optimizers.get",
        f"optimizer={value!r}",
    )


@every_family
def test_wrapper_is_an_instance_of_its_family(family):
    inner = FAMILIES[family].SGD(0.1)
    wrapper = rs.DistributedOptimizer(inner, rs.Dense())
    assert isinstance(wrapper, rs.DistributedOptimizer)
    assert isinstance(wrapper, FAMILIES[family].Optimizer)
    assert issubclass(type(wrapper), rs.DistributedOptimizer)
    assert not isinstance(inner, rs.DistributedOptimizer)
    again = type(wrapper).from_config(wrapper.get_config())
    assert isinstance(again, rs.DistributedOptimizer) and again.method == rs.Dense()


def test_wrapper_is_not_an_instance_of_a_subclass():
    class Own(rs.DistributedOptimizer):
        pass

    wrapper = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
    assert not isinstance(wrapper, Own) and issubclass(Own, rs.DistributedOptimizer)


def test_signature_and_attributes_are_visible_to_editors():
    given = inspect.signature(rs.DistributedOptimizer).parameters
    assert list(given)[:2] == ["optimizer", "method"]
    assert {"warm_up", "name", "on_drift"} <= set(given)
    names = {"explain", "bytes_per_step", "exchange", "prune", "method", "learning_rate", "build"}
    found = {*dir(rs.DistributedOptimizer), *typing.get_type_hints(rs.DistributedOptimizer)}
    assert names | {"apply_gradients", "iterations", "inner_optimizer"} <= found


@loop("value", ["redsync", 0.001, rs.RedSync, [rs.Dense()]])
@every_family
def test_non_method_is_rejected(family, value):
    assert_raises(
        ValueError,
        lambda: rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), value),
        "`method` must be a method such as tf_redsync.RedSync",
        f"method={value!r}",
    )


@every_family
def test_wrapping_twice_is_rejected(family):
    once = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), rs.Dense())
    assert_raises(
        ValueError,
        lambda: rs.DistributedOptimizer(once, rs.RedSync()),
        "`optimizer` is already wrapped",
        f"optimizer={type(once).__name__} around SGD",
    )


@every_family
def test_wrapping_the_same_inner_optimizer_twice_is_rejected(family):
    inner = FAMILIES[family].SGD(0.1)
    rs.DistributedOptimizer(inner, rs.Dense())
    assert_raises(
        ValueError, lambda: rs.DistributedOptimizer(inner, rs.RedSync()), "already wrapped"
    )


BOTH_SIDES = [
    (lambda o: o.SGD(0.1, momentum=0.8), "momentum=0.8", "SGD", False),
    (lambda o: o.Adam(0.1), "beta_1=0.9", "Adam", True),
    (lambda o: o.RMSprop(0.1, momentum=0.3), "momentum=0.3", "RMSprop", False),
    (lambda o: o.Nadam(0.1, beta_1=0.7), "beta_1=0.7", "Nadam", True),
]


@loop(("make", "argument", "name", "adaptive"), BOTH_SIDES)
@every_family
def test_momentum_on_both_sides(family, make, argument, name, adaptive):
    inner, either = make(FAMILIES[family]), f"Either use {name}("
    sparse = f"Instead of {name} use SGD with CodedAdam()" if adaptive else either
    for method, label, advice in (
        (rs.RedSync(momentum=0.9), "RedSync", sparse),
        (rs.Dense(momentum=0.9), "Dense", either),
        (rs.Policy(default=rs.Dense(momentum=0.9)), "Dense", either),
    ):
        assert_raises(
            ValueError,
            lambda method=method: rs.DistributedOptimizer(inner, method),
            "momentum is set on both sides",
            f"{argument} in {name}",
            f"momentum=0.9 in {label}. {advice}",
        )


def test_momentum_inside_a_wrapper_is_detected():
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.8))
    assert_raises(
        ValueError,
        lambda: rs.DistributedOptimizer(inner, rs.RedSync(momentum=0.9)),
        "momentum=0.8",
    )


@needs("OptimizerMap")
@loop("method", [rs.Dense(), rs.CodedGMC(), None])
@loop("scaled", [False, True])
def test_several_optimizers_in_one_are_rejected(scaled, method):
    """This error precedes the advice about momentum."""
    choice = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1), {".*kernel": keras.optimizers.Adam()}
    )
    several = keras.optimizers.MultiOptimizer(choice)
    if scaled:
        several = keras.optimizers.LossScaleOptimizer(several)
    assert_raises(
        ValueError,
        lambda: rs.DistributedOptimizer(several, method),
        "optimizer=MultiOptimizer",
        "MultiOptimizer(OptimizerMap(DistributedOptimizer(",
    )


@every_family
def test_momentum_on_one_side_is_accepted(family):
    optimizers = FAMILIES[family]
    rs.DistributedOptimizer(optimizers.SGD(0.1), rs.RedSync(momentum=0.9))
    rs.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9), rs.RedSync())
    rs.DistributedOptimizer(optimizers.Adam(0.1), rs.RedSync())
    rs.DistributedOptimizer(optimizers.Adam(0.1, beta_1=0.0), rs.RedSync(momentum=0.9))


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_bad_bucket_bytes(mirrored, library):
    with mirrored(2).scope():
        model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(2)])
        assert_raises(
            ValueError,
            lambda: rs.DistributedOptimizer(
                library.optimizers.SGD(0.1), rs.Dense(), bucket_bytes=-5
            ).build(model.trainable_variables),
            "`bucket_bytes`",
            "bucket_bytes=-5",
        )


def small_model(dtype="float32"):
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, dtype=dtype)])


@pytest.mark.parametrize("scaled", [False, True])
def test_gradient_accumulation(mirrored, scaled):
    with mirrored(2).scope():
        model = small_model()
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        if scaled:
            inner = keras.optimizers.LossScaleOptimizer(inner)
        optimizer = rs.DistributedOptimizer(inner, rs.Dense())
        for _ in range(2):  # a retry raises the same error
            assert_raises(
                ValueError,
                lambda: optimizer.build(model.trainable_variables),
                "`gradient_accumulation_steps`",
                "gradient_accumulation_steps=4",
            )


def test_float64_model(mirrored):
    with mirrored(2).scope():
        model = small_model("float64")
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
        assert_raises(
            TypeError,
            lambda: optimizer.build(model.trainable_variables),
            "kernel",
            "dtype=float64",
            "float32, bfloat16 or float16",
        )


def test_float8_layers(mirrored):
    """Keras sets their scales to each replica's own values, without a sum over the replicas."""
    with mirrored(2).scope():
        model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(16)])
        model.layers[0].quantize("float8")
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
        assert_raises(
            ValueError,
            lambda: optimizer.build(model.trainable_variables),
            "float8",
            "inputs_scale",
        )


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
@pytest.mark.parametrize("family", ["keras", "tf_keras", "legacy"])
def test_unsupported_strategy(family, devices):
    library = keras if family == "keras" else tf_keras
    strategy = tf.distribute.experimental.CentralStorageStrategy(devices)
    with strategy.scope():
        variables = [tf.Variable([[1.0, 2.0]], name="v")]
        optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), rs.Dense())
        assert_raises(
            ValueError,
            lambda: optimizer.build(
                variables if library is tf_keras else small_model().trainable_variables
            ),
            "strategy=CentralStorageStrategy",
        )


def test_apply_before_build_without_variables(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        model = small_model()
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())

    @tf.function
    def step():
        def replica():
            grads = [tf.ones(v.shape) for v in model.trainable_variables]
            optimizer.apply(grads)

        strategy.run(replica)

    assert_raises((RuntimeError, ValueError), step, "build")


def test_variable_of_another_model(mirrored):
    strategy = mirrored(1)
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first, second = small_model(), small_model()
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
        optimizer.build(first.trainable_variables)
        grads = [tf.ones(v.shape) for v in second.trainable_variables]
        with pytest.raises(ValueError, match="Unknown variable.*kernel"):
            strategy.run(lambda: optimizer.apply(grads, second.trainable_variables))


@pytest.mark.parametrize("family", ["tf_keras", "legacy"])
def test_skipping_the_aggregation_is_rejected(family):
    optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), rs.Dense())
    pairs = [(tf.ones([2]), tf.Variable([1.0, 2.0]))]
    arguments = [{"experimental_aggregate_gradients": False}]
    if family == "tf_keras":
        arguments.append({"skip_gradients_aggregation": True})
    for argument in arguments:
        assert_raises(
            ValueError,
            lambda argument=argument: optimizer.apply_gradients(pairs, **argument),
            "would skip the exchange",
            "gradients",
        )


@every_family
def test_step_without_any_gradient_is_rejected(family):
    """As by the plain optimizer: the loss does not depend on the variables."""
    optimizer, variable = FAMILIES[family].SGD(0.1), tf.Variable([1.0, 2.0])
    for wrap in (lambda plain: plain, lambda plain: rs.DistributedOptimizer(plain, rs.Dense())):
        chosen = wrap(optimizer)
        assert_raises(
            ValueError,
            lambda chosen=chosen: chosen.apply_gradients([(None, variable)]),
            "No gradients provided for any variable",
        )


def test_aggregator_of_gradients_is_rejected():
    def mean(grads_and_vars):
        return grads_and_vars

    rs.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(gradient_transformers=[mean]))
    assert_raises(
        ValueError,
        lambda: rs.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(gradient_aggregator=mean)),
        f"Received: {mean!r} in SGD",
    )


@pytest.mark.parametrize("family", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_clipping_that_would_act_on_momenta_or_not_on_local_steps(family):
    adam, sgd = family.Adam(0.001, global_clipnorm=1.0), family.SGD(0.1, clipvalue=0.5)
    one_bit = rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(5))
    for inner, method in ((adam, one_bit), (sgd, rs.CDSGD())):
        assert_raises(
            ValueError,
            lambda inner=inner, method=method: rs.DistributedOptimizer(inner, method),
            f"would clip the totals of {type(method).__name__}", "use Keras 3",
        )  # fmt: skip
    rs.DistributedOptimizer(keras.optimizers.SGD(0.1, clipvalue=0.5), rs.CDSGD())


@pytest.mark.parametrize("name", ["aggregate_gradients", "_aggregate_gradients"])
def test_summing_function_of_a_users_class(name):
    family = tf_keras.optimizers.legacy if name.startswith("_") else tf_keras.optimizers
    own = type("Own", (family.SGD,), {name: lambda self, pairs: pairs})
    assert_raises(
        ValueError, lambda: rs.DistributedOptimizer(own(0.1)), "sums gradients", "in Own. Remove it"
    )


@every_family
def test_default_method_is_auto(family):
    optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1))
    assert optimizer.exchange.policy == rs.Auto()


@every_family
def test_explain_before_build(family):
    optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1))
    assert_raises(RuntimeError, optimizer.explain, "`explain`", "build")
    assert_raises(RuntimeError, optimizer.bytes_per_step, "`bytes_per_step`", "build")


@every_family
def test_config_round_trip(family):
    policy = rs.Policy(
        default=rs.RedSync(density=0.01, momentum=0.9),
        rules=(rs.Rule(pattern="embedding", method=rs.Dense(momentum=0.9)),),
    )
    optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.25), policy, bucket_bytes=4096)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.exchange.policy == policy
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert float(np.asarray(again.learning_rate)) == 0.25
    assert again.get_config() == optimizer.get_config()


def test_config_of_a_users_optimizer_without_the_wrappers_class():
    class Own(keras.optimizers.SGD):
        pass

    optimizer = rs.DistributedOptimizer(Own(0.25), rs.TopK(density=0.5), check_every=7)
    config = optimizer.get_config()
    again = rs.DistributedOptimizer.from_config(config, {"Own": Own})
    assert type(again) is type(optimizer) and type(again.inner_optimizer) is Own
    assert again.get_config() == config


def test_step_in_a_branch_is_rejected():
    optimizer, variable = rs.DistributedOptimizer(sgd(), rs.Dense()), tf.Variable([1.0])
    optimizer.build([variable])

    @tf.function
    def every_second_step(step):
        if step % 2 == 0:
            optimizer.apply_gradients([(tf.ones([1]), variable)])

    assert_raises(ValueError, lambda: every_second_step(tf.constant(1)), "gradient_accumulation")


@every_family
def test_learning_rate_is_the_inner_one(family):
    optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.25), rs.Dense())
    optimizer.learning_rate = 0.5
    assert float(np.asarray(optimizer.inner_optimizer.learning_rate)) == 0.5


TYPOS = {
    "typo": (lambda: rs.RedSync(densty=0.1), "no argument `densty`. Did you mean `density`?"),
    "nothing alike": (lambda: rs.Dense(foo=2), "no argument `foo`. Arguments: momentum, nesterov."),
    "coding": (lambda: rs.codings.SignedLevels(bit=1), "Did you mean `bits`?"),
    "policy": (lambda: rs.Policy(defualt=rs.Dense()), "Did you mean `default`?"),
    "wrapper": (
        lambda: rs.DistributedOptimizer(keras.optimizers.SGD(), rs.Dense(), bucket_byte=1),
        "DistributedOptimizer has no argument `bucket_byte`. Did you mean `bucket_bytes`?",
    ),
    "Horovod": (
        lambda: rs.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=4),
        "Horovod's `backward_passes_per_step` use `gradient_accumulation_steps`",
    ),
    "positional": (
        lambda: rs.RedSync(0.01),
        "RedSync takes its arguments by name, as in RedSync(density=0.01). Arguments: density, ",
    ),
    "steps": (lambda: rs.LocalSGD(4), "as in LocalSGD(steps=4)"),
    "none": (lambda: rs.NoExchange(3), "NoExchange takes its arguments by name. It has none."),
}


@loop("what", TYPOS)
def test_unknown_arguments(what):
    make, words = TYPOS[what]
    assert_raises(TypeError, make, words)


def sgd():
    return keras.optimizers.SGD(0.1)


CLASSES = {
    "method": (lambda: rs.DistributedOptimizer(sgd(), rs.RedSync), "call it, RedSync(...)"),
    "optimizer": (lambda: rs.DistributedOptimizer(keras.optimizers.SGD), "call it, SGD(...)"),
    "policy": (lambda: rs.Policy(default=rs.TopK), "call it, TopK(...)"),
    "rule": (lambda: rs.Rule(pattern="x", method=rs.TopK), "call it, TopK(...)"),
    "candidate": (lambda: rs.Auto(candidates=(rs.TopK,)), "call it, TopK(...)"),
    "coded": (lambda: rs.Coded(method=rs.TopK), "call it, TopK(...)"),
    "warm-up": (
        lambda: rs.DistributedOptimizer(sgd(), rs.TopK(), warm_up=rs.DenseWarmUp),
        "call it, DenseWarmUp(...)",
    ),
    "swapped": (
        lambda: rs.DistributedOptimizer(rs.TopK(), sgd()),
        "`optimizer` must be an optimizer",
    ),
}


@loop("what", CLASSES)
def test_class_instead_of_an_object(what):
    make, words = CLASSES[what]
    assert_raises((TypeError, ValueError), make, words)


def test_positional_arguments_of_the_class_still_work():
    assert rs.DenseWarmUp(5) == rs.DenseWarmUp(steps=5)
    assert inspect.signature(rs.RedSync).parameters["density"].default == 0.001


def test_loss_scale_around_a_wrapper_moves_inside():
    """`compile` reorders the two unless they are already in use; a custom loop raises."""
    wrapped = rs.DistributedOptimizer(sgd(), rs.Dense())
    model = small_model()
    model.compile(keras.optimizers.LossScaleOptimizer(wrapped), "mse")
    assert model.optimizer is wrapped
    scaler = wrapped.inner_optimizer
    assert isinstance(scaler, keras.optimizers.LossScaleOptimizer)
    again = type(wrapped).from_config(wrapped.get_config())
    model.compile(keras.optimizers.LossScaleOptimizer(again), "mse")  # one is enough
    assert model.optimizer is again
    assert not hasattr(again.inner_optimizer.inner_optimizer, "inner_optimizer")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert_raises(
        ValueError,
        lambda: model.compile(keras.optimizers.LossScaleOptimizer(again), "mse"),
        "DistributedOptimizer(LossScaleOptimizer(inner))",
    )


def test_loss_scale_without_scale_loss_warns():
    for calls in (False, True):
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer = rs.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd()), rs.Dense())
        optimizer.build([variable])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                scale = optimizer.scale_loss(1.0) if calls else 1.0
                optimizer.apply([scale * tf.ones(3)], [variable])
            optimizer.flush()
        assert sum("scale_loss" in str(w.message) for w in caught) == (not calls)
    loss = tf.ones([])
    assert rs.DistributedOptimizer(sgd(), rs.Dense()).scale_loss(loss) is loss


def several(inside=False, **options):
    """Returns a `MultiOptimizer` of wrapped optimizers, optionally with scales inside of them."""

    def wrapped():
        inner = keras.optimizers.LossScaleOptimizer(sgd()) if inside else sgd()
        return rs.DistributedOptimizer(inner, rs.Dense())

    choice = keras.optimizers.OptimizerMap(wrapped(), {".*bias": wrapped()})
    return keras.optimizers.MultiOptimizer(choice, **options)


@needs("OptimizerMap")
def test_loss_scale_of_several_optimizers_in_one(tmp_path):
    """A `LossScaleOptimizer` raises in `compile`; a constant scale trains, and its model loads."""
    x, y, path = np.ones((4, 3)), np.ones((4, 2)), str(tmp_path / "model.keras")
    model, advice = small_model(), ("loss_scale_factor=", "auto_scale_loss=False")
    for optimizer in (keras.optimizers.LossScaleOptimizer(several()), several(inside=True)):
        assert_raises(ValueError, lambda o=optimizer: model.compile(o, "mse"), *advice)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = small_model()
        before = model.get_weights()[0]
        assert_raises(ValueError, lambda: model.compile(several(), "mse"), *advice)
        model.compile(several(loss_scale_factor=1024.0), "mse", auto_scale_loss=False)
        model.fit(x, y, verbose=0)
        model.save(path)
        loaded = keras.saving.load_model(path)  # Keras does not save `auto_scale_loss`
    finally:
        keras.config.set_dtype_policy("float32")
    assert np.abs(model.get_weights()[0] - before).max() > 1e-3
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert_raises(ValueError, lambda: loaded.fit(x, y, verbose=0), "`loss_scale_factor`")


@loop("steps", [None, 2])
def test_constant_loss_scale_with_an_embedding(steps):
    """Training equals that without the scale. Keras 3 itself cannot divide slices."""

    def train(**options):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        inner = keras.optimizers.Adam(0.1, gradient_accumulation_steps=steps, **options)
        model.compile(rs.DistributedOptimizer(inner, rs.Dense()), "mse")
        ids = np.array([[1, 1, 2, 3, 8], [0, 1, 2, 2, 2]])
        for _ in range(4):
            model.train_on_batch(ids, np.ones((2, 3)))
        return model.get_weights()

    for scaled, plain in zip(train(loss_scale_factor=1024.0), train(), strict=True):
        np.testing.assert_array_equal(scaled, plain)


def test_model_with_a_loss_scale_can_be_compiled_again():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = small_model()
        wrapped = rs.DistributedOptimizer(sgd(), rs.Dense())
        for loss in ("mse", "mae"):
            model.compile(wrapped, loss)
            model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.optimizer is wrapped and int(wrapped.iterations.numpy()) == 2


@every_family
def test_step_outside_of_the_strategy_is_rejected(family, mirrored):
    """TensorFlow has a replica context there, too, in which nothing would be exchanged rightly."""
    with mirrored(2).scope():
        variable = tf.Variable(tf.zeros([4]))
        optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), rs.TopK(density=0.5))
        optimizer.build([variable])
    for step in (lambda f: f(), lambda f: tf.function(f)()):
        assert_raises(
            RuntimeError,
            lambda step=step: step(
                lambda: optimizer.apply_gradients([(tf.ones([4]), variable)]) and None
            ),
            "inside the function that is passed to `strategy.run`",
        )
