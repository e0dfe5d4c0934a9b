"""The state of a training as arrays: model, optimizers, metrics and exchanges.

Names of Keras used here, all public: a model's `variables` and `metrics`, an optimizer's
`variables`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.keras import conflicts, momentum, slots
from tf_redsync.keras.models import (
    exchange_of,
    optimizers_of,
    optimizers_of_attributes,
    wrapped_attributes,
)
from tf_redsync.keras.slots import tf_variable
from tf_redsync.network import strategies
from tf_redsync.state.agreed_checkpoints import LoadedCheckpoint

MODEL, _OPTIMIZER, _METRICS = "model", "optimizer", "metrics"
_REPLICA = "@"  # precedes a replica's index in the names of its values


def build(model: Any) -> None:
    """Build a model's optimizer, if it is not built.

    Raises:
        ValueError: the model or another of its optimizers is not built.
    """
    if not model.built:
        raise ValueError(
            "`Checkpoint` needs a model that is built when `fit` begins. Call model.build(...) in "
            f"the strategy's scope. Received: {type(model).__name__} without variables"
        )
    if not model.optimizer.exchange.built:  # tf_keras builds it in the first step
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    names = [n for n, wrapper in wrapped_attributes(model) if not wrapper.exchange.built]
    if names:
        raise ValueError(
            "`Checkpoint` saves all wrapped optimizers of a model, and needs them built when `fit` "
            f"begins. Received: {type(model).__name__} with {', '.join(names)} not built. Call "
            "build(...) of each of them with its variables in the strategy's scope."
        )
    known = {id(wrapper) for wrapper in optimizers_of(model)}
    inner = [n for n, o in optimizers_of_attributes(model) if id(o) not in known]
    if inner:
        warnings.warn(
            f"`Checkpoint` does not save the optimizers of compiled models inside: "
            f"{', '.join(inner)}. If `train_step` uses them, make them attributes of the model.",
            stacklevel=3,
        )


def shared(model: Any) -> dict[str, Callable[[], np.ndarray]]:
    """Return functions, by name, that read the variables that steps change and workers share."""
    return {name: copies[0].numpy for name, copies in variables(model).items()}


def may_differ(model: Any) -> set[str]:
    """Return names in `shared` whose values may differ between workers, such as statistics.

    Trainable weights are excluded, because the exchange's state contains per-worker weights.
    """
    trainable = {id(tf_variable(v)) for v in model.trainable_variables}
    return {
        f"{MODEL}/{i}" for i, v in enumerate(model.variables) if id(tf_variable(v)) not in trainable
    }


def per_worker(model: Any, with_metrics: bool) -> dict[str, np.ndarray]:
    """Return this worker's own values of exchanges, accumulators, metrics and further replicas.

    Args:
        model: A model between two steps.
        with_metrics: Whether to include metrics, because an epoch is in progress.
    """
    values = {
        f"{prefix}{name}": value
        for prefix, exchange in _exchanges(model).items()
        for name, value in exchange.worker_state().items()
    }
    accumulators = set(_accumulators(model))
    for name, copies in variables(model).items():
        if name in accumulators:
            values[f"{name}{_REPLICA}0"] = copies[0].numpy()
        first = copies[0].numpy() if len(copies) > 1 else None
        for i, copy in enumerate(copies[1:], 1):
            value = copy.numpy()
            if first is not None and value.tobytes() != first.tobytes():
                values[f"{name}{_REPLICA}{i}"] = value
    if with_metrics:
        for name, copies in _metrics(model).items():
            values |= {f"{name}{_REPLICA}{i}": c.numpy() for i, c in enumerate(copies)}
    return values


def restore(model: Any, checkpoint: LoadedCheckpoint) -> dict[str, np.ndarray]:
    """Restore a model from a checkpoint; return the values of its metrics.

    All workers must call it.

    Raises:
        ValueError: the exchange's state belongs to another model or method.
    """
    workers = strategies.process_count(model.distribute_strategy)
    values = checkpoint.own[0] if checkpoint.manifest.workers == workers else {}
    if not values:  # the update sums the accumulators over the workers
        strategy, network = model.distribute_strategy, model.optimizer.exchange.network
        for key in (f"{name}{_REPLICA}0" for name in _accumulators(model)):
            parts = [part[key] for part in checkpoint.own]
            own = np.sum(parts, axis=0, dtype=parts[0].dtype)
            own = np.zeros_like(own) if checkpoint.repeated else own
            values[key] = strategies.sum_over_processes(strategy, network, own) / workers
    for name, copies in variables(model).items():
        for i, copy in enumerate(copies):
            copy.assign(values.get(f"{name}{_REPLICA}{i}", checkpoint.shared[name]))
    for prefix, exchange in _exchanges(model).items():
        exchange.restore_worker_states(
            [
                {n.removeprefix(prefix): v for n, v in part.items() if n.startswith(prefix)}
                for part in checkpoint.own
            ]
        )
    return {n: v for n, v in values.items() if n.startswith(f"{_METRICS}/")}


def restore_metrics(model: Any, values: dict[str, np.ndarray]) -> None:
    """Restore metrics, if the model has the same metrics already."""
    copies = {
        f"{name}{_REPLICA}{i}": copy
        for name, group in _metrics(model).items()
        for i, copy in enumerate(group)
    }
    if values.keys() == copies.keys() and all(suits(c, values[n]) for n, c in copies.items()):
        for name, copy in copies.items():
            copy.assign(values[name])


def subject(model: Any) -> dict[str, Any]:
    """Return a description of a model that its checkpoints must match; see `differences`.

    Its options may change; see `changed_options`.
    """
    wrappers = optimizers_of(model)
    inner = [conflicts.innermost(o.inner_optimizer) for o in wrappers]
    options = json.dumps([_options(o) for o in wrappers], default=_plain)
    options = json.loads(options)  # as they are read from a manifest
    groups = {MODEL: model.variables, _OPTIMIZER: _variables_of_optimizers(model)}
    return {
        "kind": {
            "optimizer": "; ".join(type(i).__name__ for i in inner),
            "method": "; ".join(_methods(o["method"]) for o in options),
        },
        "variables": {
            name: [[_title(v), *_form(tf_variable(v))] for v in listed]
            for name, listed in groups.items()
        },
        "options": options,
    }


def rate(model: Any) -> float:
    """Return the learning rate of a model's optimizer at this step."""
    return float(np.asarray(tf.convert_to_tensor(exchange_of(model).rate())))


def _plain(value: Any) -> Any:
    """Return numbers and arrays of numpy as those of Python, and other objects as their class."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _options(wrapper: Any) -> dict[str, Any]:
    """Return the serialized options of a wrapped optimizer, and of the one inside."""
    config, inner = momentum.config_of(wrapper), momentum.innermost(wrapper)
    of_inner = momentum.config_of(inner)
    rate = of_inner.pop("learning_rate", None)
    with momentum.without_rate_function(inner) as schedule:
        pass
    if schedule is not None:
        rate = {"class_name": type(schedule).__name__}
        with contextlib.suppress(AttributeError, NotImplementedError):
            rate["config"] = schedule.get_config()  # type: ignore[attr-defined]
    optimizer = {name: value for name, value in of_inner.items() if name != "name"}
    return {
        "method": config["method"],
        "warm_up": config["warm_up"],
        "learning_rate": rate,
        "optimizer": {"class_name": type(inner).__name__, "config": optimizer},
    }


def versions(model: Any) -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint."""
    family = type(model.optimizer).saving.__name__.partition(".")[0]
    packages = ("tf_redsync", "tensorflow", family, "numpy")
    return {p: getattr(importlib.import_module(p), "__version__", "") for p in packages}


def _exchanges(model: Any) -> dict[str, Any]:
    """Return the exchange of each optimizer, by the prefix of its values' names."""
    exchanges = [optimizer.exchange for optimizer in optimizers_of(model)]
    return {f"exchange{f'.{i}' if i else ''}/": exchange for i, exchange in enumerate(exchanges)}


def _variables_of_optimizers(model: Any) -> list[Any]:
    return [
        v for optimizer in optimizers_of(model) for v in _variables_of_optimizer(model, optimizer)
    ]


def _variables_of_optimizer(model: Any, optimizer: Any) -> list[Any]:
    """Return an optimizer's variables, in tf_keras including unlisted ones (a learning rate)."""
    listed: list[Any] = list(slots.all_variables(optimizer))
    if type(optimizer).saving.__name__.startswith("tf_keras"):
        known = {slots.key(tf_variable(v)) for v in [*listed, *model.variables]}
        for tracked in tf.train.TrackableView(optimizer.inner_optimizer).descendants():
            if isinstance(tracked, tf.Variable) and slots.key(tracked) not in known:
                known.add(slots.key(tracked))
                listed.append(tracked)
    return listed


def variables(model: Any) -> dict[str, tuple[tf.Variable, ...]]:
    """Return this process's copies of each variable that steps change, except metrics, by name."""
    return {
        **_copies(MODEL, model.variables),
        **_copies(_OPTIMIZER, _variables_of_optimizers(model)),
    }


def _accumulators(model: Any) -> list[str]:
    """Return the names of variables in which optimizers of Keras 3 accumulate gradients."""
    listed = enumerate(_variables_of_optimizers(model))
    return [f"{_OPTIMIZER}/{i}" for i, v in listed if "_gradient_accumulator" in _title(v)]


def _metrics(model: Any) -> dict[str, tuple[tf.Variable, ...]]:
    return _copies(_METRICS, [v for metric in model.metrics for v in metric.variables])


def _copies(prefix: str, listed: Sequence[Any]) -> dict[str, tuple[tf.Variable, ...]]:
    named = {f"{prefix}/{i}": tf_variable(v) for i, v in enumerate(listed)}
    return {name: tuple(getattr(v, "values", (v,))) for name, v in named.items()}


def replicas(name: str, copies: Sequence[tf.Variable]) -> list[str]:
    """Return the names of a variable's values on the further replicas of this process."""
    return [f"{name}{_REPLICA}{i}" for i in range(1, len(copies))]


def suits(variable: tf.Variable, value: np.ndarray) -> bool:
    """Return whether a value has the dtype and shape of a variable."""
    same_type = value.dtype == np.dtype(variable.dtype.as_numpy_dtype)
    return same_type and variable.shape.is_compatible_with(value.shape)


def _form(variable: tf.Variable) -> list[Any]:
    return [variable.dtype.name, [-1 if n is None else n for n in variable.shape]]


def _title(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _methods(config: Any) -> str:
    """Return the names of the classes in a config, without hyper-parameters."""
    names: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("class_name"), str):
                names.append(value["class_name"])
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(config)
    return ", ".join(names)


def validator(model: Any) -> Callable[[Mapping[str, np.ndarray]], str]:
    """Return a function that returns the reason why saved values cannot be trained further.

    It takes values of `shared` or `per_worker` by name, and returns `""` if they are valid. It does
    not read the model, so another thread may call it. Trainable weights must be finite. An
    optimizer's variables must not be NaN, but sums of squares of large gradients may be infinite.
    Other variables of the model, such as the user's masks with minus infinity, may have any value.
    """
    of_the_user, expected = may_differ(model), variables(model)

    def problem(values: Mapping[str, np.ndarray]) -> str:
        for name, copies in expected.items():
            variable = copies[0]
            for key in [k for k in (name, *replicas(name, copies)) if k in values]:
                value = values[key]
                if not suits(variable, value):
                    form = f"{variable.dtype.name}{variable.shape}"
                    return f"{key} must be {form}. Received: {value.dtype}{value.shape}"
                numbers = variable.dtype.is_floating or variable.dtype.is_complex
                if name in of_the_user or not numbers:
                    continue
                trained = name.startswith(f"{MODEL}/")
                bad = int(np.sum(~np.isfinite(value) if trained else np.isnan(value)))
                if bad:
                    kind = "non-finite" if trained else "NaN"
                    return f"{bad} of {value.size} numbers of {variable.name} ({key}) are {kind}"
        return ""

    return problem


def check(model: Any, checkpoint: LoadedCheckpoint) -> None:
    """Check that a checkpoint fits a model, without communication.

    Raises:
        ValueError: values are missing, have another shape or dtype, or are non-finite.
    """
    missing = [name for name in variables(model) if name not in checkpoint.shared]
    if missing:
        raise ValueError(f"its files lack {len(missing)} variables, such as {missing[0]}")
    problem = validator(model)
    for values in (checkpoint.shared, *checkpoint.own):
        if reason := problem(values):
            raise ValueError(reason)
