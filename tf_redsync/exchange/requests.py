"""What an exchange may ask of the network.

A method's ``exchange`` is a generator. It *yields* one of these requests and is resumed with the
result, so it never knows whether real workers, a loopback in one process or a dry run answer it.
The shapes of a request are equal on all workers; a length that varies by worker travels in a
message of fixed capacity with a count inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Ask for the messages of all workers.

    Attributes:
        message: int32 tensor of shape `[words]`. Word 0 is the finite flag of `wire.py`: 1 when
            everything this worker contributes is finite, else 0.
        sent: For statistics only: how many elements of each of the bucket's tensors the message
            holds, int32 `[tensors]`; `None` where that is not counted.

    The generator is resumed with an int32 tensor of shape `[workers, words]`, in rank order.
    """

    message: tf.Tensor
    sent: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Ask for the elementwise sum over all workers.

    Attributes:
        tensors: floating-point tensors of any static shapes. They travel in one collective.

    The generator is resumed with a list of the sums, in the same order.
    """

    tensors: Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Ask every worker for the row meant for this one.

    Attributes:
        messages: int32 tensor of shape `[workers, words]`; row `r` goes to worker `r`. Word 0 of
            every row is the finite flag.

    The generator is resumed with an int32 tensor of shape `[workers, words]`; row `r` came from
    worker `r`.
    """

    messages: tf.Tensor


@dataclasses.dataclass(frozen=True)
class PairGather:
    """Ask for the message of one other worker, the partner, and give it this one's.

    Partners differ in one bit of their ranks: worker `r` and worker `r XOR distance`. Rounds with
    the distances 1, 2, 4, ... are recursive doubling: after them all of 2^m workers know what all
    had. Only the two partners see each other's flag, so an exchange must put what it has seen into
    the flags of its later messages, until all workers know.

    Attributes:
        message: int32 tensor of shape `[words]`. Word 0 is the finite flag.
        distance: A power of two. Workers whose partner would have a rank beyond the last one's get
            their own message and, for the missing one, a message that says nothing: flag 1, then
            zeros (`wire.absent`).

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
