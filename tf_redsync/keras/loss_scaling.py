"""A `LossScaleOptimizer` around the wrapper goes inside of it, when a model is compiled.

Workers must agree on whether a step is finite before they exchange, so the exchange cannot stand
in a branch of another optimizer's. But under the policy "mixed_float16" `compile` puts a
`LossScaleOptimizer` around any optimizer that is none, and users may do so, too.

Names of Keras used here, all public: the method `compile` of `Model` and its `optimizer`.
"""

from __future__ import annotations

from typing import Any

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
