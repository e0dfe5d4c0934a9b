"""The exchanges of Keras models, and detection of running Keras methods such as loading.

Names of Keras used here: the function `load_model`, and `compile_from_config` of `Model`, both
public; of tf_keras's models `_steps_per_execution`; and in the frames of `fit`, `evaluate` and
`predict` the variable `epoch_iterator` of Keras 3 and `data_handler` of tf_keras.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from tf_redsync.keras import conflicts, slots
from tf_redsync.step import workers


def exchange_of(model: Any) -> Any:
    """Return the `GradientExchange` of a model's optimizer, or `None`."""
    return getattr(getattr(model, "optimizer", None), "exchange", None)


def optimizers_of(model: Any) -> list[Any]:
    """Return a model's optimizer or `None`, then other wrapped optimizers among its attributes.

    A model with its own `train_step` may have several, such as a GAN, also in a list or dict.
    Attributes are in the order of their names, which is equal on all workers.
    """
    others = [optimizer for _, optimizer in wrapped_attributes(model)]
    return list({id(o): o for o in (getattr(model, "optimizer", None), *others)}.values())


def is_wrapper(optimizer: Any) -> bool:
    """Return whether an optimizer is a `DistributedOptimizer` of any family."""
    return hasattr(type(optimizer), "adopt_scaler")


def wrapped_attributes(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's wrapped optimizers, each with the name of the attribute that holds it."""
    for name, value in sorted(vars(model).items()):
        if name.startswith("_self_"):  # where TensorFlow lists all attributes again
            continue
        members: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
        if isinstance(value, dict):
            members = value.values()
        yield from ((name, member) for member in members if is_wrapper(member))


def optimizers_of_attributes(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the wrapped optimizers of compiled models that are attributes, with their names."""
    for name, value in sorted(vars(model).items()):
        if is_wrapper(optimizer := getattr(value, "optimizer", None)):
            yield f"{name}.optimizer", optimizer


def exchanges_of(model: Any) -> list[Any]:
    """Return the exchanges of a model's optimizers; a `MultiOptimizer` may have several."""
    optimizer, *others = optimizers_of(model)
    parts = [optimizer]
    if conflicts.is_multi_optimizer(optimizer):
        specs = getattr(optimizer, "optimizer_specs", None)  # TensorFlow Addons
        parts = list(optimizer.optimizers) if specs is None else [s["optimizer"] for s in specs]
    exchanges = (getattr(part, "exchange", None) for part in (*parts, *others))
    return [exchange for exchange in exchanges if exchange is not None]


def skipped_steps(model: Any) -> int:
    """Return the number of steps that a model's optimizers have skipped.

    Several optimizers skip independently; this is their maximum.
    """
    skipped = (int(e.skipped.numpy()) for e in exchanges_of(model) if e.built)
    return max(skipped, default=0)


def steps_per_execution(model: Any) -> int:
    """Return `steps_per_execution` of a model; in tf_keras a variable, or absent.

    Callbacks count steps by it: Keras 3.10 passes `on_train_batch_end` the index of an execution's
    first step, other versions that of its last step.
    """
    value = getattr(model, "steps_per_execution", None)
    if value is None:
        value = getattr(model, "_steps_per_execution", None)
    return 1 if value is None else int(value.numpy() if hasattr(value, "numpy") else value)


_REBUILDS = ("load_model", "compile_from_config")


def may_train(variables: Sequence[Any]) -> bool:
    """Check, before an optimizer creates variables, that the workers train together.

    Args:
        variables: The model's variables that the optimizer is built with.

    Returns:
        Whether the workers train together. `False` while Keras loads a model outside of the
        strategy's scope: Keras builds the optimizer even of a model that only predicts. The first
        training step of such a model raises.

    Raises:
        ValueError: this worker would train alone, or the variables are outside of the strategy's
            scope, unless Keras loads a model.
    """
    try:
        workers.check_together(tf.distribute.get_strategy())
        workers.check_in_scope([slots.tf_variable(v) for v in variables])
    except ValueError:
        if not is_loading():
            raise
        return False
    return True


def is_loading() -> bool:
    """Return whether Keras is loading or rebuilding a model in this thread."""
    return any(name in _REBUILDS for name in keras_functions())


def keras_functions() -> Iterator[str]:
    """Yield the names of the Keras functions that run in this thread, the innermost first."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("keras", "tf_keras"):
            yield frame.f_code.co_name


def running_locals(model: Any, *methods: str) -> dict[str, Any]:
    """Return the local variables of the innermost running method of a model.

    Args:
        model: The model.
        methods: Names of the methods, of `"fit"`, `"evaluate"` and `"predict"`.

    Returns:
        The variables of Keras's method; an empty dict if none is running, or if the model overrides
        it without a call of Keras's.
    """
    for frame in _frames():
        # Reading `f_locals` of other frames would keep the user's values alive.
        names = frame.f_locals if frame.f_code.co_name in methods else {}
        if names.get("self") is model:
            return dict(names) if {"epoch_iterator", "data_handler"} & names.keys() else {}
    return {}


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the functions that run in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
