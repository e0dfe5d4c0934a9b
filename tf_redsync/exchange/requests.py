"""Requests that an exchange sends to the network.

A method's `exchange` is a generator. It *yields* a request and is resumed with the answer. The
answer comes from other workers, from a loopback in one process or from a dry run.

The requests of all workers must have the same types, order and shapes. Otherwise training waits
forever, without an error. `loopback.py` detects only differences that come from `ctx.rank`,
gradients or states, not those from the environment of a process. Data whose length varies by worker
is sent in a message of fixed capacity with a count inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Gathers the messages of all workers.

    Attributes:
        message: int32 tensor of shape `[words]`. Word 0 is the finite flag of `wire.py`: 1 if all
            values that this worker contributes are finite, else 0.
        sent: For metrics: returns the number of elements of each of the bucket's tensors in the
            message, int32 `[tensors]`; `None` if they are not counted.

    The generator is resumed with an int32 tensor of shape `[workers, words]`, in rank order.
    """

    message: tf.Tensor
    sent: Callable[[], tf.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Sums tensors elementwise over all workers.

    Attributes:
        tensors: Floating-point tensors of static shapes, summed in one collective.

    The generator is resumed with a list of the sums, in the same order.
    """

    tensors: Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Sends one row to each worker and receives one from each.

    Attributes:
        messages: int32 tensor of shape `[workers, words]`; row `r` goes to worker `r`. Word 0 of
            every row is the finite flag.

    The generator is resumed with an int32 tensor of shape `[workers, words]`; row `r` came from
    worker `r`.
    """

    messages: tf.Tensor


@dataclasses.dataclass(frozen=True)
class PairGather:
    """Exchanges messages with one other worker, the partner.

    Partners differ in one bit of their ranks: worker `r` and worker `r XOR distance`. Rounds with
    distances 1, 2, 4, ... are recursive doubling: after m rounds each of 2^m workers has the data
    of all. Only the two partners see each other's flag, so an exchange must forward it in the flags
    of its later messages to all workers.

    Attributes:
        message: int32 tensor of shape `[words]`. Word 0 is the finite flag.
        distance: A power of two. A worker whose partner would have a rank beyond the last one
            receives its own message and a placeholder: flag 1, then zeros (`wire.absent`).

    The generator is resumed with an int32 tensor of shape `[2, words]`; the row of the lower rank
    comes first.
    """

    message: tf.Tensor
    distance: int

    def __post_init__(self) -> None:
        if self.distance < 1 or self.distance & (self.distance - 1):
            raise ValueError(
                "`distance` must be a power of two: partners differ in one bit of their ranks. "
                f"Received: distance={self.distance}."
            )


Request = AllGather | AllReduce | AllToAll | PairGather
