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
    """A way of exchanging gradients. Frozen, pure: hyper-parameters and nothing else.

    Subclasses are frozen dataclasses with `register`; conformance tests check their `traits`. Some
    methods also implement classes of `exchange/capabilities.py`.
    """

    @property
    def traits(self) -> Traits:
        """Declarations about the method, for its hyper-parameters."""
        return Traits()

    @property
    def sync_schedule(self) -> SyncSchedule:
        """When the method exchanges what; it decides which schedule of `step/` runs."""
        return SyncSchedule()

    def refuses(self, spec: TensorSpec) -> str | None:
        """Return why this method does not serve a tensor, or `None` if it does."""
        del spec
        return None

    def dense(self) -> Method:
        """Return the method for tensors that this one refuses."""
        raise NotImplementedError

    def describe(self, spec: TensorSpec) -> str:
        """Return in a few words what happens to a tensor that this method serves."""
        del spec
        return type(self).__name__

    def init(self, layout: BucketLayout) -> State:
        """Return the state of one worker before the first step.

        Zeros for every tensor, under each name of `traits.state_kinds`.
        """
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {name: list(zeros) for name in self.traits.state_kinds}

    def payloads(self, layout: BucketLayout, step: int) -> Payloads | None:
        """Return what `exchange` asks for, where a formula tells; `None`: a trace has to.

        Args:
            layout: The bucket.
            step: A step after all warm-ups.

        Returns:
            The types of the requests, in order, and the bytes of this worker's payload in each.
        """
        del layout, step
        return None

    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the gradients of one bucket.

        Args:
            grads: This worker's float32 gradients, one for each of `ctx.layout.specs`.
            state: This worker's state.
            ctx: The bucket, this worker's rank, the step, and a factor for the gradients.

        Yields:
            Requests to the network.

        Returns:
            The totals, one float32 tensor for each gradient: the SUM over workers of what was
            delivered; and the new state, which holds what was not.
        """
        raise NotImplementedError

    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange one bucket densely, for warm-up and for one worker; otherwise as `exchange`."""
        totals = yield AllReduce(feedback.scaled(grads, ctx.scale))
        return totals, state
