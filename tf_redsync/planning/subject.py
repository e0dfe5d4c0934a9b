"""The model that a plan is made for: found by name, with a batch, its gradient and its time."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.auto import probe
from tf_redsync.exchange.layout import TensorSpec, tensor_spec
from tf_redsync.keras.slots import tf_variable
from tf_redsync.planning import PlanError, synthetic

REPEATS = 5
ENOUGH_SECONDS = 10.0
RETURNS = "a built Keras model, (model, (inputs, labels)) or (model, (inputs, labels), loss)"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, a batch and a loss.

    Attributes:
        model: Keras 3 or tf_keras.
        inputs: What the model is called with.
        labels: What the loss compares its outputs to.
        loss: `(labels, outputs)` -> loss of the examples, or their mean. `None`: the one that the
            model is compiled with.
        synthetic: Whether batch and loss were made up here.
    """

    model: Any
    inputs: Any
    labels: Any
    loss: Callable[..., Any] | None
    synthetic: bool

    @property
    def specs(self) -> list[TensorSpec]:
        """The trainable variables, in the model's order."""
        return [tensor_spec(v, i) for i, v in enumerate(self.model.trainable_variables)]

    @property
    def optimizer(self) -> Any:
        """The optimizer that the model is compiled with, or `None`."""
        return getattr(self.model, "optimizer", None)

    def gradient_function(self) -> Callable[[], list[tf.Tensor | tf.IndexedSlices | None]]:
        """Return a function that computes the gradient of the batch, one for each variable."""
        both = tf.function(self.loss_and_gradient_function())
        return lambda: both()[1]

    def loss_and_gradient_function(
        self,
    ) -> Callable[[], tuple[tf.Tensor, list[tf.Tensor | tf.IndexedSlices | None]]]:
        """Return the same with the loss, as a function that has no graph of its own."""
        variables = [tf_variable(v) for v in self.model.trainable_variables]
        trains = _takes_training(self.model)

        def gradient() -> tuple[tf.Tensor, list[Any]]:
            with tf.GradientTape() as tape:
                options = {"training": True} if trains else {}
                loss = _loss(self, self.model(self.inputs, **options))
            return loss, tape.gradient(loss, variables)

        return gradient


def load(target: str) -> Any:
    """Import `module:function`, the current directory first, and return what the function returns.

    Raises:
        PlanError: if there is no such module or function, or it wants arguments.
    """
    name, colon, attribute = target.partition(":")
    if not colon or not name or not attribute or name.endswith(".py"):
        raise PlanError(
            "`--model` must be module:function, as in train:build_model for the function "
            f"build_model of the file train.py here. Received: --model={target}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise PlanError(
            f"there is no module {error.name!r}, neither in this directory nor installed. Received:"
            f" --model={target}. Change to the directory that the module is in."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PlanError(
            f"{name} has no function {attribute!r}. Received: --model={target}. It must return "
            f"{RETURNS}."
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise PlanError(
            f"{attribute} must be callable without arguments ({error}). Received: --model={target}."
            " Wrap it in a function that passes them."
        ) from error
    return function()


def subject(returned: Any, batch_size: int | None) -> Subject:
    """Make a subject of what the user's function returned.

    Args:
        returned: See `RETURNS`.
        batch_size: Examples in a synthetic batch; `None` for 32.

    Raises:
        PlanError: for something else, or a model that says too little about its inputs.
    """
    model, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
    is_model = callable(getattr(model, "call", None)) and hasattr(model, "trainable_variables")
    if not is_model or len(rest) > 2:
        raise PlanError(f"the function must return {RETURNS}. Received: {_kind(returned)}")
    if not rest:
        made = Subject(model, *synthetic.batch(model, batch_size or 32), synthetic=True)
    else:
        made = _given(model, *rest)
        if batch_size is not None:
            raise PlanError(
                "`--batch-size` is for synthetic batches, but the function returns a batch. "
                f"Received: --batch-size={batch_size}. Leave it out."
            )
    if not getattr(model, "built", True) or not model.trainable_variables:
        model(made.inputs)  # builds it
    if not model.trainable_variables:
        raise PlanError("the model has no trainable variables, so there is nothing to exchange")
    return made


def gradient(made: Subject) -> list[tf.Tensor | None]:
    """Return the gradient as dense float32 tensors; `None` for what the loss does not depend on.

    Raises:
        PlanError: if it is not finite.
    """
    found: list[tf.Tensor | None] = []
    for spec, grad in zip(made.specs, made.gradient_function()(), strict=True):
        dense = None if grad is None else tf.cast(tf.convert_to_tensor(grad), tf.float32)
        if dense is not None and not bool(tf.reduce_all(tf.math.is_finite(dense))):
            raise PlanError(
                f"the gradient of {spec.name} is not finite. Return a batch and a loss that the "
                "model can be trained with."
            )
        found.append(dense)
    return found


def compute_seconds(made: Subject) -> float:
    """Measure the forward and backward pass on this device: the median of some."""
    run = made.gradient_function()
    times: list[float] = []
    for i in range(2 + REPEATS):  # the first traces, the second warms up
        start = time.perf_counter()
        probe.wait([g for g in run() if g is not None])
        if i >= 2:
            times.append(time.perf_counter() - start)
        if sum(times) > ENOUGH_SECONDS:
            break
    return statistics.median(times)


def _given(model: Any, batch: Any, loss: Any = None) -> Subject:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PlanError(
            f"the batch must be (inputs, labels). Received: {_kind(batch)}. The function must "
            f"return {RETURNS}."
        )
    if loss is None and getattr(model, "loss", None) is None:
        raise PlanError(
            "the model is not compiled, so the batch has no loss. Return (model, (inputs, labels), "
            "loss), or compile the model with a loss."
        )
    if loss is not None and not callable(loss):
        raise PlanError(
            "the loss must be a function of labels and outputs, such as "
            f"keras.losses.MeanSquaredError(). Received: {loss!r}"
        )
    inputs, labels = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
    return Subject(model, inputs, labels, loss, synthetic=False)


def _loss(made: Subject, outputs: Any) -> tf.Tensor:
    if made.loss is None:
        return made.model.compute_loss(x=made.inputs, y=made.labels, y_pred=outputs)
    own = tf.reduce_mean(made.loss(made.labels, outputs))
    return tf.add_n([own, *(tf.cast(extra, own.dtype) for extra in made.model.losses)])


def _takes_training(model: Any) -> bool:
    parameters = inspect.signature(model.call).parameters.values()
    return any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(v).__name__ for v in value)
        return f"{type(value).__name__} of {inside or 'nothing'}"
    return type(value).__name__
