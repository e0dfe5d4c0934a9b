"""The callback that `fit`, `evaluate` and `predict` insert first."""

import keras
import numpy as np
import pytest
import tf_keras

import tf_redsync as rs
from tf_redsync.keras import fit_hook
from tf_redsync.keras.fit_hook import FitHook

EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_test_begin",
    "on_epoch_end",
    "on_train_end",
    "on_predict_begin",
)


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_hook_precedes_user_callbacks(family, monkeypatch):
    seen = []
    for event in EVENTS:
        monkeypatch.setattr(FitHook, event, lambda self, *a, event=event, **k: seen.append(event))
    before = family.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append("user"))
    model = family.Sequential([family.layers.Input((3,)), family.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(family.optimizers.SGD(0.1), rs.Dense()), "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, validation_data=(x, y), epochs=1, verbose=0, callbacks=[before])
    model.predict(x, verbose=0)
    expected = list(EVENTS)
    expected.insert(2, "user")
    assert seen == expected


def test_models_without_the_wrapper_have_no_hook():
    import tf_redsync.keras.keras3  # noqa: F401 - installs it

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = keras.callbacks.CallbackList([], model=model).callbacks
    assert not any(isinstance(c, FitHook) for c in found)


def test_running_method_ignores_user_functions():
    seen = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(fit_hook.running_method())
    )
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[note])

    def fit():
        return fit_hook.running_method()

    assert [*seen, fit()] == ["fit", ""]
