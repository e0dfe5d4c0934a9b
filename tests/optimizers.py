"""All installed optimizers, found in the namespaces of their libraries.

Tests therefore include the new optimizers of a new Keras version.
"""

import functools

import pytest

FAMILIES = ("keras3", "tf_keras", "legacy", "addons")

# Required constructor arguments; all other optimizers are built with their defaults.
_KERAS_3 = {"LossScaleOptimizer": lambda o: o.LossScaleOptimizer(o.SGD(0.01), initial_scale=4.0)}
_ADDONS = {
    "SWA": lambda o, legacy: o.SWA(legacy.SGD(0.01), start_averaging=4, average_period=2),
    "MovingAverage": lambda o, legacy: o.MovingAverage(legacy.SGD(0.01)),
    "Lookahead": lambda o, legacy: o.Lookahead(legacy.SGD(0.01)),
    "AdamW": lambda o, legacy: o.AdamW(weight_decay=1e-4),
    "SGDW": lambda o, legacy: o.SGDW(weight_decay=1e-4, learning_rate=0.01),
    "ConditionalGradient": lambda o, legacy: o.ConditionalGradient(0.99, 0.5, ord="fro"),
}
# Optimizers that contain optimizers for parts of the model, and names that are no optimizers.
NOT_WRAPPED = {"Optimizer", "MultiOptimizer", "KerasLegacyOptimizer", "AveragedOptimizerWrapper"}


def needs(name):
    """Returns a mark that skips a test if this Keras has no optimizer of a name."""
    import keras

    reason = f"Keras {keras.__version__} has no {name}"
    return pytest.mark.skipif(not hasattr(keras.optimizers, name), reason=reason)


def has_muon():
    """Whether `keras.optimizers.Muon` works on TensorFlow, as since Keras 3.13."""
    import keras

    return hasattr(keras.optimizers.Muon, "lr_adjust")


def library_of(family):
    """Keras 3, or tf_keras for all others."""
    import keras
    import tf_keras

    return keras if family == "keras3" else tf_keras


def all_of(family):
    """Constructors of all optimizers of a family, by name."""
    import keras
    import tf_keras

    import tf_redsync as rs

    legacy = tf_keras.optimizers.legacy
    if family == "addons":
        module, special, arguments = rs.addons.load().optimizers, _ADDONS, (legacy,)
    else:
        modules = {"keras3": keras.optimizers, "tf_keras": tf_keras.optimizers, "legacy": legacy}
        module, special, arguments = modules[family], _KERAS_3 if family == "keras3" else {}, ()
    base = getattr(module, "Optimizer", legacy.Optimizer)
    makers = {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and name not in NOT_WRAPPED
    }
    for name, make in special.items():
        makers[name] = functools.partial(make, module, *arguments)
    if not has_muon():
        makers.pop("Muon", None)
    return makers
