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

    The generator is resumed with an int32 tensor of shape `[workers, words]`, in rank order.
    """

    message: tf.Tensor


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


Request = AllGather | AllReduce | AllToAll
