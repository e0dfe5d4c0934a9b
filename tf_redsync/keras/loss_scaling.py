"""A `LossScaleOptimizer` around the wrapper goes inside of it, when a model is compiled.

Workers must agree on whether a step is finite before they exchange, so the exchange cannot stand
in a branch of another optimizer's. But under the policy "mixed_float16" `compile` puts a
`LossScaleOptimizer` around any optimizer that is none, and users may do so, too.

Workers agree on every step that is skipped, before the branch that holds the exchange, unless they
step by themselves: then the exchange skips, as it does without a scale, and each worker adapts a
scale of its own. Scales need not be equal, for gradients are divided by them before they are
exchanged.

Names of Keras used here, all public: the method `compile` of `Model` and its `optimizer`; `apply`,
`check_finite`, `dynamic_scale` and `step_counter` of Keras 3's `LossScaleOptimizer`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_redsync.keras import replacing


def install(model_class: Any) -> None:
    """Let a family's `compile` bring the two in order; a second call does nothing.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """

    def putting_in_order(compiled: Any) -> Any:
        def in_order(self: Any, *args: Any, **kwargs: Any) -> None:
            compiled(self, *args, **kwargs)
            around: Any = getattr(self, "optimizer", None)
            wrapper: Any = getattr(around, "inner_optimizer", None)
            if hasattr(wrapper, "take_inside") and not hasattr(around, "take_inside"):
                wrapper.take_inside(around)
                self.optimizer = wrapper

        return in_order

    replacing.once(model_class, "compile", putting_in_order)


def check_new(scaler: Any, wrapper: Any) -> None:
    """Check that neither of the two has been in use.

    Raises:
        ValueError: otherwise.
    """
    if wrapper.exchange.built or getattr(scaler, "built", False):
        raise ValueError(
            "a LossScaleOptimizer around tf_redsync's optimizer goes inside of it when the model "
            "is compiled, which must be before the optimizer's first step. Received: "
            f"{type(scaler).__name__} around an optimizer that is built. Make new ones: "
            "DistributedOptimizer(LossScaleOptimizer(inner))."
        )


def agree(scaler: Any, adapter: Any) -> None:
    """Let a `LossScaleOptimizer` of Keras 3 skip the steps that the workers skip.

    Args:
        scaler: The optimizer, inside of the wrapper.
        adapter: The wrapper's `Adapter`.
    """
    check, apply = scaler.check_finite, scaler.apply

    def check_everywhere(grads: Any) -> Any:
        exchange = adapter.exchange
        if exchange.schedule.own_steps:
            return tf.constant(True)
        return exchange.agree_on_finite(check(grads), grads)

    def apply_alone(grads: Any, trainable_variables: Any = None) -> None:
        if not adapter.exchange.schedule.own_steps:
            apply(grads, trainable_variables)
            return
        finite, scale = check(grads), tf.convert_to_tensor(scaler.dynamic_scale)
        apply([_nan_if_infinite(g) for g in grads], trainable_variables)
        kept, counted = map(tf.convert_to_tensor, (scaler.dynamic_scale, scaler.step_counter))
        scaler.dynamic_scale.assign(tf.where(finite, kept, 0.5 * scale))
        scaler.step_counter.assign(tf.where(finite, counted, tf.zeros_like(counted)))

    scaler.check_finite, scaler.apply = check_everywhere, apply_alone


def _nan_if_infinite(grad: Any) -> Any:
    """A gradient that no clipping can make finite before the exchange looks at it."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_nan_if_infinite(grad.values), grad.indices, grad.dense_shape)
    grad = tf.convert_to_tensor(grad)
    return tf.where(tf.math.is_finite(grad), grad, tf.constant(float("nan"), grad.dtype))
