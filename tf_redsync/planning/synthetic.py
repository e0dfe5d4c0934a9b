"""A batch made up for a model that comes without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.planning import PlanError

_SEEDS = {"inputs": (1, 0), "labels": (2, 0)}


def batch(model: Any, batch_size: int) -> tuple[Any, list[tf.Tensor], Callable[..., Any]]:
    """Return inputs, labels and a loss.

    Inputs are normal, or classes where they are integers; labels are normal and of the shapes of
    the outputs, for the squared error.

    Args:
        model: Keras 3 or tf_keras, built.
        batch_size: Number of examples.

    Raises:
        PlanError: for a model that says too little about its inputs.
    """
    wanted = getattr(model, "inputs", None)
    if not getattr(model, "built", False) or not wanted:
        raise PlanError(
            "the model does not say what its inputs look like. Give it a keras.Input, or return "
            "(model, (inputs, labels), loss)."
        )
    sizes = [getattr(layer, "input_dim", None) for layer in model.layers]  # of embeddings
    classes = min((n for n in sizes if isinstance(n, int)), default=2)
    inputs = [_made_up(t, batch_size, classes) for t in wanted]
    inputs = inputs[0] if len(inputs) == 1 else inputs
    try:
        outputs = tf.nest.flatten(model(inputs))
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise PlanError(
            f"the model cannot be called with random inputs ({error}). Return (model, (inputs, "
            "labels), loss)."
        ) from error
    labels = [_normal(o.shape, "labels") for o in outputs]
    return inputs, labels, squared_error


def _made_up(wanted: Any, batch_size: int, classes: int) -> tf.Tensor:
    shape = [batch_size, *wanted.shape[1:]]
    dtype = tf.as_dtype(wanted.dtype)
    if None in shape or not (dtype.is_floating or dtype.is_integer):
        raise PlanError(
            f"no batch can be made up for inputs of shape {tuple(wanted.shape)} and dtype "
            f"{dtype.name}. Return (model, (inputs, labels), loss)."
        )
    if dtype.is_floating:
        return tf.cast(_normal(shape, "inputs"), dtype)
    numbers = tf.random.stateless_uniform(
        shape, _SEEDS["inputs"], 0, classes, tf.int32, alg="philox"
    )
    return tf.cast(numbers, dtype)


def _normal(shape: Sequence[int], what: str) -> tf.Tensor:
    return tf.random.stateless_normal(shape, _SEEDS[what], alg="philox")


def squared_error(labels: list[tf.Tensor], outputs: Any) -> tf.Tensor:
    """Return the sum over the outputs of their mean squared errors."""
    pairs = zip(labels, tf.nest.flatten(outputs), strict=True)
    return tf.add_n([tf.reduce_mean((tf.cast(o, tf.float32) - y) ** 2) for y, o in pairs])
