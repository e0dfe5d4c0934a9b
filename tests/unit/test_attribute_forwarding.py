"""Attributes set on a wrapper reach the inner optimizer, or raise."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.deep import DEEP
from tests.loops import loop

legacy = tf_keras.optimizers.legacy
FAMILIES = {"keras": keras.optimizers, "tf_keras": tf_keras.optimizers, "legacy": legacy}
every_family = loop("family", FAMILIES)
newer = loop("family", ["keras", "tf_keras"])


def wrap(optimizer, method=None):
    return rs.DistributedOptimizer(optimizer, method or rs.Dense())


def run_steps(optimizer, weights=(1.0, 1.0), gradients=(0.0, 0.0), steps=1, traced=True):
    """Returns the weights of one variable after some steps, in a function or eagerly."""
    variable = tf.Variable(list(weights), name="kernel")

    def step():
        optimizer.apply_gradients([(tf.constant(list(gradients)), variable)])

    step = tf.function(step) if traced else step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one worker
        for _ in range(steps):
            step()
    return variable.numpy()


SETTINGS = {  # attribute: value, and the gradients that show its effect
    "weight_decay": 0.5,
    "clipnorm": 0.1,
    "clipvalue": 0.1,
    "global_clipnorm": 0.1,
    "momentum": 0.5,
    "nesterov": True,
}


# Legacy SGD has no weight decay, and decides on momentum in its constructor.
NOT_OF_LEGACY = ("weight_decay", "momentum")


def settings():
    """Returns attributes to set together, by family; Keras takes one kind of clipping at a time."""
    for family in FAMILIES:
        names = [n for n in SETTINGS if family != "legacy" or n not in NOT_OF_LEGACY]
        together = [n for n in names if n not in ("clipvalue", "global_clipnorm")]
        groups = [[n] for n in names] if DEEP else [["clipvalue"], ["global_clipnorm"]]
        yield from ((family, tuple(group)) for group in [*groups, together])


@loop("family, names", settings())
def test_attributes_set_before_the_first_step_apply(family, names):
    """As if they had been set on the plain optimizer before it was wrapped."""
    momentum = 0.9 if "nesterov" in names else 0.0
    plain, inner = (FAMILIES[family].SGD(0.1, momentum=momentum) for _ in range(2))
    optimizer = wrap(inner)
    for name in names:
        setattr(plain, name, SETTINGS[name])
        setattr(optimizer, name, SETTINGS[name])
        assert getattr(optimizer, name) == getattr(inner, name) == SETTINGS[name]
    found = run_steps(optimizer, gradients=(3.0, 4.0), steps=2)
    unset = FAMILIES[family].SGD(0.1, momentum=momentum)
    expected, other = (
        run_steps(one, gradients=(3.0, 4.0), steps=2, traced=False) for one in (plain, unset)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.allclose(found, other)


@newer
def test_ema(family):
    optimizer = wrap(FAMILIES[family].SGD(0.1))
    assert optimizer.use_ema is False
    optimizer.use_ema, optimizer.ema_momentum = True, 0.0
    run_steps(optimizer, gradients=(1.0, 1.0))
    averages = optimizer.inner_optimizer._model_variables_moving_average
    np.testing.assert_allclose(averages[0].numpy(), [0.9, 0.9], rtol=1e-6)


@newer
def test_exclude_from_weight_decay(family):
    optimizer = wrap(FAMILIES[family].SGD(0.1, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    np.testing.assert_array_equal(run_steps(optimizer), [1.0, 1.0])
    with pytest.raises(ValueError, match="exclude_from_weight_decay.*built"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


@newer
def test_constants_of_a_traced_step_are_rejected_afterwards(family):
    optimizer = wrap(FAMILIES[family].Adam(0.1))
    run_steps(optimizer)
    for name in ("weight_decay", "clipnorm", "use_ema", "beta_1", "epsilon"):
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=f"`{name}` cannot be set.*Received: {name}=0.25"):
            setattr(optimizer, name, 0.25)
        assert getattr(optimizer, name) == getattr(optimizer.inner_optimizer, name) == before
        setattr(optimizer, name, before)  # an equal value is accepted


def test_variables_may_change_at_any_time():
    """Learning rates of all families, and every hyper-parameter of the legacy one."""
    for family in FAMILIES.values():
        optimizer, variable = wrap(family.SGD(0.5)), tf.Variable([1.0])
        step = tf.function(lambda o=optimizer, v=variable: o.apply_gradients([(tf.ones([1]), v)]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step()
        optimizer.learning_rate = 0.25
        step()
        optimizer.lr = 0.125
        step()
        np.testing.assert_allclose(variable.numpy(), [0.125], rtol=1e-6)
        assert float(optimizer.learning_rate) == 0.125
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
        with pytest.raises(ValueError, match="learning_rate"):
            optimizer.learning_rate = schedule
    optimizer = wrap(legacy.Adam(0.1))
    run_steps(optimizer)
    optimizer.beta_1 = 0.5
    assert float(optimizer.inner_optimizer.beta_1.numpy()) == 0.5


def test_learning_rate_set_in_a_traced_step():
    optimizer = wrap(keras.optimizers.SGD(0.5), rs.CodedGMC(momentum=0.9))
    variable = tf.Variable([1.0])
    optimizer.build([variable])

    @tf.function
    def step():
        optimizer.learning_rate = 0.5 / (tf.cast(optimizer.iterations, tf.float32) + 1.0)
        optimizer.apply_gradients([(tf.zeros([1]), variable)])

    step()
    step()
    assert float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = keras.Variable(0.125)
    assert float(optimizer.learning_rate) == 0.125


def test_schedule_before_the_first_step():
    optimizer = wrap(keras.optimizers.SGD(0.1))
    optimizer.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.0])
    np.testing.assert_allclose(run_steps(optimizer, gradients=(1.0, 1.0), steps=3), [-1.0, -1.0])


@pytest.mark.parametrize("family", ["keras", "legacy"])
def test_number_after_steps_of_a_schedule(family):
    """As `ReduceLROnPlateau` sets it."""
    library = keras if family == "keras" else tf_keras
    optimizer = wrap(FAMILIES[family].SGD(library.optimizers.schedules.CosineDecay(0.1, 9)))
    run_steps(optimizer)
    with pytest.raises(ValueError, match="schedule.*Received: learning_rate=0.25.*a number"):
        optimizer.learning_rate = 0.25


def test_attribute_that_conflicts_with_the_method_is_rejected_and_restored():
    optimizer = wrap(keras.optimizers.SGD(0.1), rs.RedSync(momentum=0.9))
    with pytest.raises(ValueError, match="both sides"):
        optimizer.momentum = 0.5
    assert optimizer.momentum == 0.0
    optimizer = wrap(tf_keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="jit_compile"):
        optimizer.jit_compile = True
    without = wrap(legacy.SGD(0.1))
    with pytest.raises(ValueError, match="without momentum"):
        without.momentum = 0.5
    scaled = wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="twice"):
        scaled.loss_scale_factor = 2.0
    scaled.weight_decay = 0.5
    assert scaled.inner_optimizer.inner_optimizer.weight_decay == 0.5


@loop("before, after", [(None, 4), (4, 2), (4, None)])
def test_gradient_accumulation_is_fixed_by_the_constructor(before, after):
    name = "gradient_accumulation_steps"
    optimizer = wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=before))
    with pytest.raises(ValueError, match=f"`{name}`.*constructor"):
        setattr(optimizer, name, after)
    assert getattr(optimizer, name) == before
    setattr(optimizer, name, before)  # an equal value is accepted
    setattr(optimizer.inner_optimizer, name, after)
    with pytest.raises(ValueError, match=f"`{name}`.*constructor"):
        run_steps(optimizer)


@every_family
def test_user_attributes(family):
    method = rs.TopK(density=0.5)
    optimizer = wrap(FAMILIES[family].SGD(0.1), method)
    assert optimizer.method == method
    for name in ("method", "exchange", "inner_optimizer"):
        before = getattr(optimizer, name)
        with pytest.raises(AttributeError, match=f"`{name}` of a DistributedOptimizer"):
            setattr(optimizer, name, rs.Dense())
        assert getattr(optimizer, name) is before or name == "method"
    optimizer.note = "mine"  # the user's own attribute
    assert optimizer.note == "mine" and not hasattr(optimizer.inner_optimizer, "note")
    with pytest.raises(AttributeError, match="no attribute 'beta_17'"):
        _ = optimizer.beta_17
    policy = rs.Policy(default=method, output_layer="x")
    assert wrap(FAMILIES[family].SGD(0.1), policy).method is policy
    assert rs.DistributedOptimizer(FAMILIES[family].SGD(0.1)).method == rs.Auto()


@every_family
def test_inner_optimizer_cannot_be_applied_directly(family):
    for first in (False, True):  # whether the wrapper is applied before
        optimizer, variable = wrap(FAMILIES[family].SGD(0.1)), tf.Variable([1.0])
        if first:
            with pytest.warns(UserWarning, match="one worker"):
                optimizer.apply_gradients([(tf.ones([1]), variable)])
        before = variable.numpy()
        with pytest.raises(RuntimeError, match="belongs to a DistributedOptimizer"):
            optimizer.inner_optimizer.apply_gradients([(tf.ones([1]), variable)])
        np.testing.assert_array_equal(variable.numpy(), before)


# Public names of the families' base classes that do not depend on the optimizer.
INDIFFERENT = {
    "keras": "add_optimizer_variables add_variable add_variable_from_reference apply_gradients "
    "assign assign_add assign_sub stateless_apply update_step",
    "tf_keras": "add_variable add_variable_from_reference load_own_variables minimize "
    "save_own_variables update_step",
    "legacy": "add_slot add_weight get_gradients get_slot_names get_updates get_weights minimize "
    "set_weights",
}


@every_family
def test_no_base_class_attribute_bypasses_the_inner_optimizer(family):
    """Every new attribute of Keras must be forwarded, rejected or independent of the optimizer."""
    optimizer, base = wrap(FAMILIES[family].SGD(0.1)), FAMILIES[family].Optimizer
    public = [n for n in dir(base) if not n.startswith("_")]
    owned = {n for c in type(optimizer).__mro__ if "tf_redsync" in c.__module__ for n in vars(c)}
    assert set(public) - owned == set(INDIFFERENT[family].split())
    left = {n for n in vars(optimizer) if not n.startswith("_")} & set(vars(FAMILIES[family].SGD()))
    assert left <= {"name", "built"}
