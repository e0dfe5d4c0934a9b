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
            state: This worker's state.
            ctx: The bucket, this worker's rank, the step, and a factor for the gradients. Unless a
                native op takes it as `scale`, apply it first:
                `grads = feedback.scaled(grads, ctx.scale)`.

        Yields:
            Requests to the network.

        Returns:
            The totals, one float32 tensor for each gradient: the SUM over workers of the delivered
            parts. And the new state, which holds the parts that were not delivered.
        """
        raise NotImplementedError

    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange one bucket densely, in warm-ups and with one worker; see `exchange`."""
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        return totals, state
