"""Optional capabilities of methods: base classes that a method inherits besides `Method`.

For example, a method that clips is a `class MyMethod(Clipping, Method)`. Callers ask
`capability(method, Clipping)`, which also searches wrapped methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

if TYPE_CHECKING:
    import numpy as np

    from tf_redsync.exchange.context import Context
    from tf_redsync.exchange.layout import BucketLayout, TensorSpec
    from tf_redsync.exchange.method import Exchange, Method, State

_T = TypeVar("_T")


class Wrapping:
    """A method that wraps another one and has its capabilities, too.

    Attributes:
        method: The wrapped method, or `None`.
    """

    method: Any


class Clipping:
    """Clips the norm of a worker's whole gradient, over all buckets, before the exchange.

    Lin, Han, Mao, Wang, Dally (2018), "Deep Gradient Compression", section 3.2: local gradient
    clipping.
    """

    @property
    def clip_norm(self) -> float | None:
        """Bound on the L2 norm of the sum of all workers' gradients; `None`: no clipping."""
        raise NotImplementedError

    def clip_scale(self, grads: list[tf.Tensor], workers: int) -> tf.Tensor | None:
        """Return the factor for all gradients of this worker, a float32 scalar, or `None`.

        Args:
            grads: All gradients of this worker, float32 or bfloat16 in the variables' shapes.
            workers: Number of workers.
        """
        raise NotImplementedError


class EvaluationPoint:
    """Computes gradients at a separate point on each worker; needs `SyncSchedule.own_point`.

    Yu, Dong, Xu, Ouyang, Liao (2021), "CD-SGD", arXiv 2106.10796; Xu, Huang (2021), "Detached Error
    Feedback for Distributed SGD with Random Sparsification", arXiv 2004.05298.
    """

    def point(
        self,
        weights: list[tf.Tensor],
        grads: list[tf.Tensor],
        state: State,
        rate: tf.Tensor,
        workers: int,
    ) -> list[tf.Tensor]:
        """Return the weights at which this worker computes its next gradients.

        Args:
            weights: The weights that all workers agree on: float32, one for each tensor of the
                bucket.
            grads: This worker's gradients of this step, as passed to `exchange`; same shapes.
            state: This worker's state after the step.
            rate: The optimizer's learning rate, float32 scalar.
            workers: Number of workers.
        """
        raise NotImplementedError


class LocalMomentum:
    """Exchanges momenta, which local steps change in between; needs `SyncSchedule.intervals`.

    The state contains `momentum` and `rates`. `rates` is the sum of `rate_of_step` over the local
    steps of a round. A round with non-finite changes sets both to 0.

    Lu, Li, Zhang, De Sa, He (2022), "Maximizing Communication Efficiency for Large-scale Training
    via 0/1 Adam", arXiv 2202.06009.
    """

    def local_step(self, totals: list[tf.Tensor], state: State) -> tuple[list[tf.Tensor], State]:
        """Return the update of a local step, and the worker's new state.

        Args:
            totals: This worker's gradients times the number of workers: float32, one for each
                tensor of the bucket. The update has the same shapes.
            state: This worker's state.
        """
        raise NotImplementedError

    def momentum_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Run a synchronous step whose totals are momenta; see `Method.exchange`."""
        raise NotImplementedError

    def rate_of_step(self, rate: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """Return the factor of the momentum in the update of a local step, a float32 scalar.

        Args:
            rate: The learning rate, float32 scalar.
            steps: Number of steps so far, including this one, float32 scalar.
        """
        raise NotImplementedError


class Fragmented:
    """Exchanges fragments of the model in turn; needs `SyncSchedule.fragments`.

    Douillard et al. (2025), "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.
    """

    @property
    def fragmentation(self) -> Any:
        """Settings of the fragments and of their merge; equal in all methods of a policy."""
        raise NotImplementedError

    def fragments_of(self, specs: Sequence[TensorSpec]) -> list[int]:
        """Return the index of each tensor's fragment, from 0."""
        raise NotImplementedError


class AdamMoments:
    """Keeps Adam's momentum in the state, from which `keras/slots.py` sets the optimizer's slots.

    The state contains `momentum`, and optionally `variance`, Adam's bias-corrected second moment.
    With a `variance` the slots are set in every step, otherwise only after the dense warm-up.

    Tang et al. (2021), "1-bit Adam", arXiv 2102.02888.
    """

    @property
    def adam(self) -> dict[str, float]:
        """Values by name that the optimizer's hyper-parameters must have, such as `beta_1`."""
        raise NotImplementedError


class DenseStart:
    """Begins every training with a dense warm-up of all methods.

    Lin, Stich, Patel, Jaggi (2020), "Don't Use Large Mini-Batches, Use Local SGD", arXiv
    1808.07217.
    """

    @property
    def dense_start(self) -> Any:
        """The warm-up, a `DenseWarmUp`; `None` for none."""
        raise NotImplementedError


class Staged:
    """Runs a different method in each of `SyncSchedule.stages`."""

    def at(self, step: int) -> Method:
        """Return the method that runs at a step; its state has the same form in all stages."""
        raise NotImplementedError


class Masked:
    """Never sends pruned elements; the state contains a bool tensor `mask` for each tensor.

    Weights are 0 where the mask is `False`. The adapters set them to 0 after every update.
    """

    def with_masks(self, layout: BucketLayout, masks: Sequence[np.ndarray]) -> State:
        """Return the state for new masks, bool, one for each tensor of the bucket."""
        raise NotImplementedError


class Waiting:
    """Exchanges densely until `ready` returns true; needs `SyncSchedule.waits_for`."""

    def ready(self, state: State) -> tf.Tensor:
        """Return whether the wait is over, a bool scalar that depends on `"shared"` state only."""
        raise NotImplementedError


def capability(method: Any, kind: type[_T]) -> _T | None:
    """Return the method, or the first wrapped method, that has a capability; else `None`."""
    while not isinstance(method, kind):
        if not isinstance(method, Wrapping):
            return None
        method = method.method
    return method


def required(method: Any, kind: type[_T]) -> _T:
    """Return the method or wrapped method with a capability that its `sync_schedule` needs.

    Raises:
        TypeError: if no such method has it.
    """
    provider = capability(method, kind)
    if provider is None:
        raise TypeError(
            f"{type(method).__name__} must be a subclass of tf_redsync.exchange.capabilities."
            f"{kind.__name__}, as its `sync_schedule` says."
        )
    return provider


def clipping(method: Any) -> Clipping | None:
    """Return the method that clips the whole gradient, or `None` without a `clip_norm`."""
    provider = capability(method, Clipping)
    return None if provider is None or provider.clip_norm is None else provider


def dense_start(method: Any) -> Any:
    """Return the `DenseWarmUp` at the start of a method's training, or `None`."""
    provider = capability(method, DenseStart)
    return None if provider is None else provider.dense_start


def always_dense(method: Any) -> bool:
    """Return whether a method runs the same exchange in dense and in compressed steps."""
    return type(method).exchange is type(method).dense_exchange


def at_step(method: Any, step: int) -> Any:
    """Return the method that runs at a step; a wrapper then wraps the stage of its method."""
    if isinstance(method, Staged):
        return method.at(step)
    if not isinstance(method, Wrapping) or method.method is None:
        return method
    inside = at_step(method.method, step)
    return method if inside is method.method else dataclasses.replace(method, method=inside)  # type: ignore[type-var]
