"""Loss scaling: `LossScaleOptimizer` inside the wrapper, and agreement on skipped steps.

Workers must agree on finiteness before they exchange, so the exchange cannot run in a branch of
another optimizer. Under the dtype policy "mixed_float16" `compile` wraps any optimizer into a
`LossScaleOptimizer`; users may do the same. `compile` therefore swaps the two optimizers.

Workers agree on skipped steps before the branch with the exchange. With local steps the exchange
skips steps, as without loss scaling, and each worker adapts its own scale. Scales may differ,
because gradients are divided by the scale before the exchange.

Public names of Keras used here: the method `compile` of `Model` and its `optimizer`; `apply`,
`check_finite`, `dynamic_scale` and `step_counter` of Keras 3's `LossScaleOptimizer`. Private: the
list `_model_variables_moving_average` of Keras 3's optimizers with `use_ema`.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tf_redsync.keras import conflicts, models


def move_scaler_inside(model: Any, given: Any) -> None:
    """Swap the optimizers if a model has a `LossScaleOptimizer` around the wrapper.

    Args:
        model: The model, just compiled.
        given: The optimizer that was passed to `compile`. If it is the wrapper and has a scale
            already, the scale that Keras has added is dropped.

    Raises:
        ValueError: the scale is around or in a `MultiOptimizer` of wrapped optimizers.
    """
    around: Any = getattr(model, "optimizer", None)
    wrapper: Any = getattr(around, "inner_optimizer", None)
    if models.is_wrapper(wrapper) and not models.is_wrapper(around):
        if wrapper is not given or not hasattr(wrapper.inner_optimizer, "inner_optimizer"):
            wrapper.adopt_scaler(around)
        model.optimizer = wrapper
    elif conflicts.is_multi_optimizer(conflicts.innermost(around)):
        _check_several(around)


def _check_several(optimizer: Any) -> None:
    """Check that a Keras 3 `MultiOptimizer` of wrapped optimizers has no `LossScaleOptimizer`.

    Raises:
        ValueError: one around it would run the exchanges in a branch; one inside of a wrapper would
            divide the gradients of a loss that it has not scaled.
    """
    several = conflicts.innermost(optimizer)
    parts = [p for p in getattr(several, "optimizers", ()) if models.is_wrapper(p)]
    inside = any(hasattr(p.inner_optimizer, "inner_optimizer") for p in parts)
    around = parts and optimizer is not several
    if (inside or around) and not models.is_loading():  # a loaded model may only predict
        raise ValueError(
            "a MultiOptimizer of DistributedOptimizers cannot have a LossScaleOptimizer, neither "
            "around it, where Keras adds one under 'mixed_float16', nor inside of them. Received: "
            f"a LossScaleOptimizer {'inside' if inside else 'around it'}. Use MultiOptimizer(..., "
            "loss_scale_factor=1024.0) and compile(..., auto_scale_loss=False), or the dtype "
            "policy 'mixed_bfloat16'."
        )


def check_new(scaler: Any, wrapper: Any) -> None:
    """Check that neither a `LossScaleOptimizer` nor the wrapper inside it is built.

    Raises:
        ValueError: one of the two is built.
    """
    if wrapper.exchange.built or getattr(scaler, "built", False):
        raise ValueError(
            "`compile` moves a LossScaleOptimizer into the DistributedOptimizer, which must happen "
            f"before the first step. Received: {type(scaler).__name__} around a built optimizer. "
            "Create new ones: DistributedOptimizer(LossScaleOptimizer(inner))."
        )


def share_averages(inner: Any) -> None:
    """Give a `LossScaleOptimizer` the averages of weights of the optimizer inside it.

    Keras's `SwapEMAWeights` reads them from the wrapper's `inner_optimizer`.
    """
    averages = getattr(conflicts.innermost(inner), "_model_variables_moving_average", None)
    if averages is not None:
        vars(inner)["_model_variables_moving_average"] = averages  # without tracking them again


def agree(scaler: Any, adapter: Any, finishes: bool) -> None:
    """Make a `LossScaleOptimizer` of Keras 3 skip steps together with the other workers.

    Args:
        scaler: The `LossScaleOptimizer` inside the wrapper.
        adapter: The wrapper's `Adapter`.
        finishes: Whether a step with own points ends in the scaler's branch. With gradient
            accumulation it ends in the branch of updates.
    """
    check, apply, update = scaler.check_finite, scaler.apply, scaler.inner_optimizer.apply
    trained: list[Any] = []  # variables of the step that is traced; empty: those of `build`

    def check_everywhere(grads: Any) -> Any:
        exchange = adapter.exchange
        if exchange.schedule.skips_locally:
            return tf.constant(True)
        return exchange.agree_on_finite(check(grads), adapter.by_position(grads, trained))

    def apply_alone(grads: Any, trainable_variables: Any = None) -> None:
        trained[:] = trainable_variables or ()
        if not adapter.exchange.schedule.skips_locally:
            apply(grads, trainable_variables)
            return
        finite, scale = check(grads), tf.convert_to_tensor(scaler.dynamic_scale)
        apply([_nan_if_infinite(g) for g in grads], trainable_variables)
        updated, counted = map(tf.convert_to_tensor, (scaler.dynamic_scale, scaler.step_counter))
        scaler.dynamic_scale.assign(tf.where(finite, updated, 0.5 * scale))
        scaler.step_counter.assign(tf.where(finite, counted, tf.zeros_like(counted)))

    def update_and_finish(grads: Any, trainable_variables: Any = None) -> None:
        update(grads, trainable_variables)
        adapter.finish_in_branch()

    scaler.check_finite, scaler.apply = check_everywhere, apply_alone
    if finishes:
        adapter.exchanges_in_branch, scaler.inner_optimizer.apply = True, update_and_finish
    _warn_unless_scaled(scaler, adapter)


def _warn_unless_scaled(scaler: Any, adapter: Any) -> None:
    """Make a `LossScaleOptimizer` of Keras 3 warn in a first step without `scale_loss`."""
    scale, apply, checked = scaler.scale_loss, scaler.apply, False

    def scale_loss(loss: Any) -> Any:
        nonlocal checked
        checked = True
        return scale(loss)

    def apply_or_warn(grads: Any, trainable_variables: Any = None) -> None:
        nonlocal checked
        if not checked and adapter.exchange.replacement is None:  # `flush` has no loss
            checked = True
            warnings.warn(
                f"the LossScaleOptimizer of {scaler.inner_optimizer.name!r} divides gradients by "
                "its loss scale, but `scale_loss` was not called, so the updates may be too small "
                "by that factor. Compute the gradients of optimizer.scale_loss(loss), unless you "
                "scale the loss yourself.",
                stacklevel=2,
            )
        apply(grads, trainable_variables)

    scaler.scale_loss, scaler.apply = scale_loss, apply_or_warn


def _nan_if_infinite(grad: Any) -> Any:
    """Return a gradient with NaN in place of infinities, which clipping could make finite."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_nan_if_infinite(grad.values), grad.indices, grad.dense_shape)
    grad = tf.convert_to_tensor(grad)
    return tf.where(tf.math.is_finite(grad), grad, tf.constant(float("nan"), grad.dtype))
