"""The base class of methods: hyper-parameters, an initial state, and a generator that exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync.config import Configurable
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllReduce, Request
from tf_redsync.exchange.sync_schedule import SyncSchedule

State = dict[str, list[tf.Tensor]]
Payloads = list[tuple[type[Request], int]]
Exchange = Generator[Request, Any, tuple[list[tf.Tensor], State]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(Configurable):
    """A way of exchanging gradients. Frozen, pure: hyper-parameters and nothing else.

    Subclasses are frozen dataclasses with `register`; conformance tests check what they declare.

    Attributes:
        state_kinds: For every name in the state: `"sum"`, `"mean"` or `"shared"`; see
            `step/state_variables.py`.
        period: Number of steps after which it does the same again: 2 for what takes turns. Times
            and bytes are counted over whole periods.
        rounds_values: Whether all values that it sends can be rounded on the way, and the rounding
            errors stay in its residual.
        votes: Whether totals are votes, -1, 0 or 1, in dense exchanges too, and so want a learning
            rate of another size than sums of gradients.
        paper: Authors and year, for `table()`.
        requests: What crosses the network in a step, in words, for `table()`.
        bits: Bits that a worker contributes per element and step, as a formula, for `table()`.
    """

    state_kinds: ClassVar[dict[str, str]] = {}
    period: ClassVar[int] = 1
    rounds_values: ClassVar[bool] = False
    votes: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    requests: ClassVar[str] = ""
    bits: ClassVar[str] = ""

    @property
    def whole_model(self) -> bool:
        """Whether all its tensors, of each fragment, must share one bucket, however large."""
        return False

    @property
    def fragmentation(self) -> Any:
        """What of it says how fragments are made and renewed, for methods in one policy."""
        return None

    def fragments_of(self, specs: Sequence[TensorSpec]) -> list[int]:
        """Return the fragment of each tensor, where `SyncSchedule.fragments` has several."""
        return [0] * len(specs)

    @property
    def conserves(self) -> bool:
        """Whether sum(gradient + old residual) = total + sum(new residual), to rounding."""
        return True

    @property
    def totals_may_overflow(self) -> bool:
        """Whether totals can be non-finite though all that the network returned is finite.

        Then every step looks at them, and is skipped by all workers if they are.
        """
        return True

    @property
    def sync_schedule(self) -> SyncSchedule:
        """When it exchanges what, for the programs."""
        return SyncSchedule()

    @property
    def dense_start(self) -> Any:
        """The `DenseWarmUp` of all methods that a training by this one begins with, or `None`."""
        return None

    def at(self, step: int) -> Method:
        """Return the method that runs at a step: another one in each of `SyncSchedule.stages`.

        Its state has the same form as this one's.
        """
        del step
        return self

    def ready(self, state: State) -> tf.Tensor:
        """Return whether what it waits for has come: bool scalar, from `"shared"` state alone."""
        raise NotImplementedError

    @property
    def waiting_steps(self) -> float:
        """Steps that an element waits on average until it is sent; 1 if each is in every step."""
        return 1.0

    @property
    def sends_selected(self) -> bool:
        """Whether all it sends are selected elements, in messages that a coding can be put on."""
        return False

    @property
    def density_changes(self) -> bool:
        """Whether the number of elements that are sent depends on the step."""
        return False

    @property
    def needs_amsgrad(self) -> bool:
        """Whether the method is made for AMSGrad as the inner optimizer."""
        return False

    @property
    def adam(self) -> dict[str, float] | None:
        """The hyper-parameters of the Adam that its totals are made for; see `keras/adam_slots.py`.

        They are momenta then, after `dense_start`; and where its state has a `variance`, that is
        Adam's, corrected for its bias. `None`: totals are gradients, for any optimizer.
        """
        return None

    @property
    def momentum_in_exchange(self) -> float:
        """Momentum that the exchange applies; the inner optimizer must then have none."""
        return 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What these hyper-parameters are not, which the method's name may lead to expect."""
        return ()

    @property
    def clip_norm(self) -> float | None:
        """The bound that the norm of the whole gradient is clipped to, by `clip_scale`, if any."""
        return None

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

    def clip_scale(self, grads: list[tf.Tensor], workers: int) -> tf.Tensor | None:
        """Return a float32 scalar to multiply all gradients of this worker by, or `None`.

        Args:
            grads: All gradients of this worker, over all buckets.
            workers: Number of workers.
        """
        del grads, workers
        return None

    def point(
        self,
        weights: list[tf.Tensor],
        grads: list[tf.Tensor],
        state: State,
        rate: tf.Tensor,
        workers: int,
    ) -> list[tf.Tensor]:
        """Return where this worker computes its next gradients.

        Args:
            weights: float32, those that all workers agree on, one for each tensor of the bucket.
            grads: This worker's gradients of this step, as `exchange` gets them.
            state: This worker's state after the step.
            rate: The optimizer's learning rate, float32 scalar.
            workers: Number of workers.
        """
        del grads, state, rate, workers
        return weights

    def alone(self, totals: list[tf.Tensor], state: State) -> tuple[list[tf.Tensor], State]:
        """Return what is applied in a local step, for this worker's gradients, and its state."""
        return totals, state

    def init(self, layout: BucketLayout) -> State:
        """Return the state of one worker before the first step.

        Zeros for every tensor, under each name of `state_kinds`.
        """
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {name: list(zeros) for name in self.state_kinds}

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
