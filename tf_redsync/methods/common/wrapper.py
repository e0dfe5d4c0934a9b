"""A method around another one: what it leaves to the method inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.methods.base import Method, State


def _of_the_method(name: str) -> Any:
    """A property that is `method`'s, or the default of `Method` without one."""
    return property(lambda self: getattr(self.method or Method(), name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodWrapper(Method):
    """A method that changes how another one's messages travel, and nothing else.

    Args:
        method: The method inside; `None` where the wrapper is a method by itself.
    """

    method: Method | None = None

    whole_model = _of_the_method("whole_model")
    warm_up_steps = _of_the_method("warm_up_steps")
    momentum_in_exchange = _of_the_method("momentum_in_exchange")
    former_states = _of_the_method("former_states")
    period = _of_the_method("period")
    own_point = _of_the_method("own_point")
    local_steps = _of_the_method("local_steps")
    needs_amsgrad = _of_the_method("needs_amsgrad")
    waiting_steps = _of_the_method("waiting_steps")

    @property
    def clip_norm(self) -> float | None:
        """The bound that the method inside clips to, if it clips."""
        return getattr(self.method, "clip_norm", None)

    @override
    def point(
        self,
        weights: list[tf.Tensor],
        grads: list[tf.Tensor],
        state: State,
        rate: tf.Tensor,
        workers: int,
    ) -> list[tf.Tensor]:
        if self.method is None:
            return weights
        return self.method.point(weights, grads, state, rate, workers)

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return self.method.refuses(spec) if self.method else None

    @override
    def clip_scale(self, grads: list[tf.Tensor], workers: int) -> tf.Tensor | None:
        return self.method.clip_scale(grads, workers) if self.method else None
