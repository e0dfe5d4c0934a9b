"""The subject of a plan: the user's model, batch, loss and method, and measurements of them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync import expressions
from tf_redsync.auto import Auto, probe
from tf_redsync.auto.bit_budget import BitBudget
from tf_redsync.auto.candidates import candidates
from tf_redsync.config import registered
from tf_redsync.exchange.capabilities import at_step
from tf_redsync.exchange.layout import TensorSpec, tensor_spec
from tf_redsync.exchange.method import Method
from tf_redsync.keras import accuracy, conflicts
from tf_redsync.keras.adapter import as_policy
from tf_redsync.keras.slots import tf_variable
from tf_redsync.planning import PlanError, prediction
from tf_redsync.policy import Policy

REPEATS = 5
ENOUGH_SECONDS = 10.0
RETURNS = "a built Keras model, (model, (inputs, labels)) or (model, (inputs, labels), loss)"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, a batch and a loss.

    Attributes:
        model: Model of Keras 3 or tf_keras.
        inputs: Inputs of the model.
        labels: Labels for the loss.
        loss: `(labels, outputs)` -> losses of the examples, or their mean. `None` for the loss that
            the model is compiled with.
        synthetic: Whether batch and loss are synthetic.
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
        """Optimizer that the model is compiled with, or `None`."""
        return getattr(self.model, "optimizer", None)

    def gradient_function(self) -> Callable[[], list[tf.Tensor | tf.IndexedSlices | None]]:
        """Return a function that computes the batch's gradients, one for each variable."""
        both = tf.function(self.loss_and_gradient_function())
        return lambda: both()[1]

    def loss_and_gradient_function(
        self,
    ) -> Callable[[], tuple[tf.Tensor, list[tf.Tensor | tf.IndexedSlices | None]]]:
        """Return an untraced function that computes the loss and the gradients."""
        variables = [tf_variable(v) for v in self.model.trainable_variables]
        trains = _takes_training(self.model)

        def gradient() -> tuple[tf.Tensor, list[Any]]:
            with tf.GradientTape() as tape:
                options = {"training": True} if trains else {}
                loss = _loss(self, self.model(self.inputs, **options))
            return loss, tape.gradient(loss, variables)

        return gradient


def load(target: str) -> Any:
    """Return the result of `module:function`; the current directory precedes installed modules.

    Raises:
        PlanError: the module or function does not exist, or the function needs arguments.
    """
    name, colon, attribute = target.partition(":")
    if not colon or not name or not attribute or name.endswith(".py"):
        raise PlanError(
            "`--model` must be module:function, such as train:build_model for the function "
            f"build_model of train.py. Received: --model={target}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but an import of it fails
        raise PlanError(
            f"`--model` must name a module in this directory or an installed one: {error.name!r} "
            f"does not exist. Received: --model={target}. Change to the module's directory."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PlanError(
            f"`--model`: the module {name} must have a function {attribute!r} that returns "
            f"{RETURNS}. Received: --model={target}"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise PlanError(
            f"{attribute} must be callable without arguments ({error}). Received: --model={target}."
            " Wrap it in a function that passes the arguments."
        ) from error
    return function()


def subject(returned: Any, batch_size: int | None) -> Subject:
    """Return the subject for the result of the user's function.

    Args:
        returned: Result of the function; see `RETURNS`.
        batch_size: Examples in a synthetic batch; `None` for 32.

    Raises:
        PlanError: the result has another form, or the model has no input shapes.
    """
    model, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
    is_model = callable(getattr(model, "call", None)) and hasattr(model, "trainable_variables")
    if not is_model or len(rest) > 2:
        raise PlanError(f"the function must return {RETURNS}. Received: {_kind(returned)}")
    if not rest:
        made = Subject(model, *synthetic_batch(model, batch_size or 32), synthetic=True)
    else:
        made = _subject_with_batch(model, *rest)
        if batch_size is not None:
            raise PlanError(
                "`--batch-size` is for synthetic batches, but the function returns a batch. Omit "
                f"it. Received: --batch-size={batch_size}"
            )
    if not getattr(model, "built", True) or not model.trainable_variables:
        model(made.inputs)  # builds it
    if not model.trainable_variables:
        raise PlanError("the model must have trainable variables. Received: a model without any")
    return made


def gradient(made: Subject) -> list[tf.Tensor | None]:
    """Return dense float32 gradients; `None` for variables that the loss does not depend on.

    Raises:
        PlanError: a gradient is non-finite.
    """
    grads: list[tf.Tensor | None] = []
    for spec, grad in zip(made.specs, made.gradient_function()(), strict=True):
        dense = None if grad is None else tf.cast(tf.convert_to_tensor(grad), tf.float32)
        if dense is not None and not bool(tf.reduce_all(tf.math.is_finite(dense))):
            raise PlanError(
                f"the gradient of {spec.name} is non-finite. Return a batch and a loss with finite "
                "gradients."
            )
        grads.append(dense)
    return grads


def compute_seconds(made: Subject) -> float:
    """Return the median time of a forward and backward pass on this device, in seconds."""
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


def _subject_with_batch(model: Any, batch: Any, loss: Any = None) -> Subject:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PlanError(
            f"the batch must be (inputs, labels). Received: {_kind(batch)}. The function must "
            f"return {RETURNS}."
        )
    if loss is None and getattr(model, "loss", None) is None:
        raise PlanError(
            "the loss is missing. Return (model, (inputs, labels), loss), or compile the model "
            "with a loss."
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
    loss = tf.reduce_mean(made.loss(made.labels, outputs))
    return tf.add_n([loss, *(tf.cast(extra, loss.dtype) for extra in made.model.losses)])


def _takes_training(model: Any) -> bool:
    parameters = inspect.signature(model.call).parameters.values()
    return any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(v).__name__ for v in value)
        return f"{type(value).__name__} of {inside or 'nothing'}"
    return type(value).__name__


_SEEDS = {"inputs": (1, 0), "labels": (2, 0)}


def synthetic_batch(model: Any, batch_size: int) -> tuple[Any, list[tf.Tensor], Callable[..., Any]]:
    """Return random inputs and labels, and a loss.

    Inputs are normally distributed, or random classes for integer inputs. Labels have the shapes of
    the outputs and are normally distributed. The loss is the squared error.

    Args:
        model: A built model of Keras 3 or tf_keras.
        batch_size: Number of examples.

    Raises:
        PlanError: the model has no input shapes, or cannot be called with random inputs.
    """
    wanted = getattr(model, "inputs", None)
    if not getattr(model, "built", False) or not wanted:
        raise PlanError(
            "the model has no input shapes. Build it with a keras.Input, or return (model, "
            "(inputs, labels), loss)."
        )
    sizes = [getattr(layer, "input_dim", None) for layer in model.layers]  # of embeddings
    classes = min((n for n in sizes if isinstance(n, int)), default=2)
    inputs = [_synthetic_inputs(t, batch_size, classes) for t in wanted]
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


def _synthetic_inputs(wanted: Any, batch_size: int, classes: int) -> tf.Tensor:
    shape = [batch_size, *wanted.shape[1:]]
    dtype = tf.as_dtype(wanted.dtype)
    if None in shape or not (dtype.is_floating or dtype.is_integer):
        raise PlanError(
            "a synthetic batch needs inputs with known shapes and float or integer dtypes. "
            f"Received: shape={tuple(wanted.shape)}, dtype={dtype.name}. Return (model, (inputs, "
            "labels), loss)."
        )
    if dtype.is_floating:
        return tf.cast(_normal(shape, "inputs"), dtype)
    numbers = tf.random.stateless_uniform(
        shape, _SEEDS["inputs"], 0, classes, tf.int32, alg="philox"
    )
    return tf.cast(numbers, dtype)


def _normal(shape: Sequence[int], role: str) -> tf.Tensor:
    return tf.random.stateless_normal(shape, _SEEDS[role], alg="philox")


def squared_error(labels: list[tf.Tensor], outputs: Any) -> tf.Tensor:
    """Return the sum of the outputs' mean squared errors."""
    pairs = zip(labels, tf.nest.flatten(outputs), strict=True)
    return tf.add_n([tf.reduce_mean((tf.cast(o, tf.float32) - y) ** 2) for y, o in pairs])


def parse_method(text: str, density: float | None = None) -> Method | Policy | Auto:
    """Return the method of an expression such as `RedSync` or `RedSync(density=0.01)`.

    See `tf_redsync/expressions.py`. A name without parentheses is called.

    Args:
        text: The expression.
        density: Density of the method; `None` if the expression sets it.

    Raises:
        PlanError: the expression is malformed, or an argument in it is out of range.

    Example:
        >>> parse_method("TopK", 0.01).density
        0.01
    """
    more = {} if density is None else {"density": density}
    try:
        evaluated = expressions.evaluate(expressions.called(text), more=more)
        if not evaluated.options:
            return evaluated.method
        reason = f"{', '.join(evaluated.options)} is an argument of DistributedOptimizer"
    except ValueError as error:
        reason = str(error)
    known = registered()
    names = ", ".join(sorted(n for n, c in known.items() if issubclass(c, Method)))
    suffix = "" if density is None else f", --density={density}"
    raise PlanError(
        f"`--method` must be Auto or one of {names}, alone or with keywords as in "
        f"'RedSync(density=0.01)'. Received: --method={text}{suffix} ({reason})"
    )


def suited(
    method: Method | Policy | Auto, optimizer: Any, warn: Callable[[str], None]
) -> Policy | Auto:
    """Return the policy to plan for a model's optimizer.

    Args:
        method: Method on the command line.
        optimizer: The model's optimizer; `None` if it is not compiled.
        warn: Called with the warnings of `DistributedOptimizer`.

    Raises:
        PlanError: the cost model does not cover a method, or the optimizer does not fit it.
    """
    policy = _last_stages(as_policy(method), warn)
    if isinstance(policy, BitBudget):
        warn(f"BitBudget needs gradients to choose; the plan is for its default, {policy.default}")
    prediction.check(policy.methods)
    inner = conflicts.innermost(optimizer)
    if inner is None:
        return policy
    try:
        return accuracy.suited(inner, policy, warn)
    except ValueError as error:
        raise PlanError(str(error)) from error


def unsuited(optimizer: Any) -> dict[Method, str]:
    """Return the methods of `candidates` that do not suit a model's optimizer, with the reasons.

    Args:
        optimizer: The model's optimizer; `None` if it is not compiled.
    """

    def ignore(_: str) -> None: ...

    auto = suited(Auto(max_overhead=1.0, step_seconds=1.0), optimizer, ignore)
    assert isinstance(auto, Auto)
    reasons = {one.method: one.reason for one in auto.left_out}
    for candidate in candidates():
        try:
            suited(candidate.method, optimizer, ignore)
        except PlanError as error:
            reasons.setdefault(candidate.method, str(error))
    return reasons


def _last_stages(policy: Policy | Auto, warn: Callable[[str], None]) -> Policy | Auto:
    """Return a policy with the last stage of each method that runs in stages."""
    if not isinstance(policy, Policy):
        return policy

    def last(method: Method) -> Method:
        stages = method.sync_schedule.stages
        return at_step(method, stages[-1]) if stages else method

    last_policy = dataclasses.replace(
        policy,
        default=last(policy.default),
        rules=tuple(dataclasses.replace(r, method=last(r.method)) for r in policy.rules),
    )
    for original, used in zip(policy.methods, last_policy.methods, strict=True):
        if used != original:
            warn(f"{type(original).__name__} runs in stages; the plan is for the last, {used!r}")
    return last_policy


def check_patterns(policy: Policy | Auto, specs: Sequence[TensorSpec]) -> None:
    """Check that each pattern of a policy matches a variable, and that each rule applies to one.

    Raises:
        PlanError: a pattern of `policy` matches none of `specs`, or a rule applies to none of them.
    """
    if isinstance(policy, Policy):
        try:
            policy.assign(specs)
        except ValueError as error:
            raise PlanError(str(error)) from error
