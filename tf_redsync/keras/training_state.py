"""What training has changed in a model and its optimizer, as arrays, and back.

The exchange's own state is not here. Names of Keras used here, all public: a model's `variables`
and `metrics`, an optimizer's `variables`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.keras import conflicts
from tf_redsync.keras.slots import tf_variable

MODEL, OPTIMIZER, METRICS = "model", "optimizer", "metrics"
_REPLICA = "@"  # before a replica's number, where it has a value of its own


def build(model: Any) -> None:
    """Make the variables of a model's optimizer, if that is not done.

    Raises:
        ValueError: for a model without variables.
    """
    if not model.built:
        raise ValueError(
            "`Checkpoint` needs a model that is built when `fit` begins. Received: "
            f"{type(model).__name__} without variables. Call model.build(...) in the strategy's "
            "scope."
        )
    if not model.optimizer.exchange.built:  # tf_keras does it in the first step
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def variables(model: Any) -> dict[str, Any]:
    """All variables that steps change, metrics left out, by names of their own."""
    return {**_numbered(MODEL, model.variables), **_numbered(OPTIMIZER, _of_optimizer(model))}


def metrics(model: Any) -> dict[str, Any]:
    """The variables of a model's metrics."""
    return _numbered(METRICS, [v for metric in model.metrics for v in metric.variables])


def own(model: Any) -> set[str]:
    """Names of `variables` that workers may have values of their own of, besides the weights.

    Weights of each worker's own are in the exchange's state, with the slots that go with them.
    """
    trainable = {id(tf_variable(v)) for v in model.trainable_variables}
    return {n for n, v in _numbered(MODEL, model.variables).items() if id(v) not in trainable}


def readers(named: Mapping[str, Any]) -> dict[str, Callable[[], np.ndarray]]:
    """What reads this worker's values of some variables, without the other workers."""
    return {name: copies[0].numpy for name, copies in _copies(named)}


def of_replicas(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The values of further replicas of this process that are not those of its first one."""
    found = {}
    for name, copies in _copies(named):
        for i, copy in enumerate(copies[1:], 1):
            value = copy.numpy()
            if value.tobytes() != copies[0].numpy().tobytes():
                found[f"{name}{_REPLICA}{i}"] = value
    return found


def assign(named: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> None:
    """Give all replicas of this process what `readers` and `of_replicas` have read."""
    for name, copies in _copies(named):
        for i, copy in enumerate(copies):
            copy.assign(values.get(f"{name}{_REPLICA}{i}", values[name]))


def subject(model: Any) -> dict[str, Any]:
    """What a checkpoint must be of to suit a model; see `manifest.differences`."""
    optimizer = model.optimizer
    inner = conflicts.innermost(optimizer.inner_optimizer)
    of = {MODEL: model.variables, OPTIMIZER: _of_optimizer(model)}
    return {
        "kind": {
            "optimizer": type(inner).__name__,
            "method": _methods(optimizer.get_config()["method"]),
        },
        "variables": {
            name: [[_title(v), *_form(tf_variable(v))] for v in listed]
            for name, listed in of.items()
        },
    }


def versions(model: Any) -> dict[str, str]:
    """Of what wrote a checkpoint."""
    family = type(model.optimizer).saving.__name__.partition(".")[0]
    packages = ("tf_redsync", "tensorflow", family, "numpy")
    return {p: getattr(importlib.import_module(p), "__version__", "") for p in packages}


def _of_optimizer(model: Any) -> list[Any]:
    listed = model.optimizer.variables
    return list(listed() if callable(listed) else listed)


def _numbered(prefix: str, listed: Any) -> dict[str, Any]:
    return {f"{prefix}/{i}": tf_variable(v) for i, v in enumerate(listed)}


def _copies(named: Mapping[str, Any]) -> Iterator[tuple[str, tuple[tf.Variable, ...]]]:
    for name, variable in named.items():
        yield name, getattr(variable, "values", (variable,))


def _form(variable: tf.Variable) -> list[Any]:
    return [variable.dtype.name, [-1 if n is None else n for n in variable.shape]]


def _title(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _methods(config: Any) -> str:
    """The names of the classes in a config, without hyper-parameters."""
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("class_name"), str):
                found.append(value["class_name"])
            for inner in value.values():
                look(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                look(inner)

    look(json.loads(json.dumps(config)))
    return ", ".join(found)
