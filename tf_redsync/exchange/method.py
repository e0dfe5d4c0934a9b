"""The base class of methods: hyper-parameters, an initial state, and a generator that exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import tensorflow as tf

from tf_redsync.config import Configurable
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllReduce, Request
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits

State = dict[str, list[tf.Tensor]]
KINDS = ("sum", "mean", "shared")  # of state; see `Traits.state_kinds`
Payloads = list[tuple[type[Request], int]]
Exchange = Generator[Request, Any, tuple[list[tf.Tensor], State]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(Configurable):
    """A method of exchanging gradients: frozen hyper-parameters, and pure functions of them.

    Subclasses are frozen dataclasses with the decorator `register`. Conformance tests check their
    `traits`. Some methods also implement classes of `exchange/capabilities.py`.
    """

    @property
    def traits(self) -> Traits:
        """Declarations about the method with these hyper-parameters."""
        return Traits()

    @property
    def sync_schedule(self) -> SyncSchedule:
        """The steps and contents of the exchanges; selects the schedule of `step/` that runs."""
        return SyncSchedule()

    def refuses(self, spec: TensorSpec) -> str | None:
        """Return the reason why this method cannot exchange a tensor, or `None` if it can."""
        del spec
        return None

    def dense(self) -> Method:
        """Return the method that exchanges the tensors that this one refuses."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `dense`, which returns the method for the tensors "
            "that `refuses` names; without any, `return self` or `return Dense()`"
        )

    def describe(self, spec: TensorSpec) -> str:
        """Return a short description of the exchange of a tensor."""
        del spec
        return type(self).__name__

    def init(self, layout: BucketLayout) -> State:
        """Return the state of one worker before the first step.

        By default, for each name of `traits.state_kinds`, float32 zeros in the shape of every
        tensor.
        """
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {name: list(zeros) for name in self.traits.state_kinds}

    def payloads(self, layout: BucketLayout, step: int) -> Payloads | None:
        """Return the requests of `exchange` by a formula; `None` if only a trace can tell.

        Args:
            layout: The bucket.
            step: A step after all warm-ups.

        Returns:
            The type of each request, in order, and the size of this worker's payload in bytes.
        """
        del layout, step
        return None

    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the gradients of one bucket.

        Args:
            grads: This worker's float32 gradients, one for each of `ctx.layout.specs` and in its
                shape. The loss is already divided by the number of workers. With
                `SyncSchedule.local_steps`: weight changes, divided by the number of workers.
            state: This worker's state, in the form of `init`.
            ctx: The bucket, this worker's rank, the step, and a factor for the gradients. Unless a
                native op takes it as `scale`, apply it first:
                `grads = feedback.scaled(grads, ctx.scale)`.

        Yields:
            Requests to the network.

        Returns:
            The totals, one float32 tensor for each gradient and in its shape: the SUM over workers
            of the delivered parts. And the new state, which holds the parts that were not
            delivered: all names, with the shapes and dtypes of `state`.
        """
        raise NotImplementedError

    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange one bucket densely, in warm-ups and with one worker; see `exchange`.

        By default it sums the gradients and leaves the state unchanged, so a method with
        `Traits.momentum_in_exchange` must override it and apply the momentum here, too.
        """
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        return totals, state


def initial_state(method: Any, layout: BucketLayout) -> State:
    """Return `method.init(layout)` as lists of tensors, after a check of what the method declares.

    Raises:
        ValueError: If the state and `Traits.state_kinds` have other names, a kind is unknown, a
            value is no list, or `dense_exchange` lacks the momentum of the traits.
    """
    name, kinds, state = type(method).__name__, method.traits.state_kinds, method.init(layout)
    if set(state) != set(kinds):
        raise ValueError(
            f"`init` of {name} must return the names of `Traits.state_kinds`, {sorted(kinds)}. "
            f"Received: {sorted(state)}"
        )
    for n, tensors in state.items():
        if kinds[n] not in KINDS:
            raise ValueError(
                f"`Traits.state_kinds` of {name} must have kinds in {KINDS}. "
                f"Received: {n!r} of kind {kinds[n]!r}"
            )
        if not isinstance(tensors, (list, tuple)):
            raise ValueError(
                f"`init` of {name} must return lists of tensors. "
                f"Received: {n!r}, a {type(tensors).__name__}"
            )
    while isinstance(method, Method):  # a wrapper, then the method inside it
        momentum = method.traits.momentum_in_exchange
        if momentum and type(method).dense_exchange is Method.dense_exchange:
            raise ValueError(
                f"{type(method).__name__} must override `dense_exchange`, and apply its momentum "
                f"there as well. Received: traits with momentum_in_exchange={momentum}"
            )
        method = getattr(method, "method", None)
    return {n: list(map(tf.convert_to_tensor, tensors)) for n, tensors in state.items()}
