"""Checksums of messages: a worker notices that what arrived is not what was sent.

The checksum of words `w` is the sum of `w[i] * g^(i + 1)` modulo the prime `p = 2^32 - 5`. It
stands in the place of the message's flag, which is one more term, so that no message gets longer.
It finds every change of a single word, but for -5 and 0 up to -1 and 4, which are equal modulo p,
and any two inverted bits in messages of up to 2^25 words; of other changes it misses one in 2^32.

On a GPU nobody looks at a flag that is to be sealed: one that is neither 0 nor 1 gets a seal that
no receiver takes.
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import checksums as reference

__all__ = ["NOBODY", "opened", "sealed"]

NOBODY = -1  # in place of a sender's rank


def sealed(messages: tf.Tensor) -> tf.Tensor:
    """Put a checksum into the flag of each message.

    Args:
        messages: int32 `[rows, words]`; word 0 is the flag, 0 or 1.

    Returns:
        int32 `[rows, words]`: the same but for word 0.

    Raises:
        tf.errors.InvalidArgumentError: when run, for another flag.
    """
    if runs_natively([messages]):
        return native.load().redsync_seal(messages=messages)
    return reference.sealed(messages)


def opened(messages: tf.Tensor, senders: tf.Tensor, receiver: tf.Tensor) -> tf.Tensor:
    """Undo `sealed` where messages arrive.

    Args:
        messages: int32 `[rows, words]`.
        senders: int32 `[rows]`, the rank of each one's sender. A row of `NOBODY` is left as it is.
        receiver: int32 scalar, this worker's rank.

    Returns:
        int32 `[rows, words]`, what was sealed.

    Raises:
        tf.errors.InvalidArgumentError: when run, for a message that is not what was sealed; the
            error names the sender.
    """
    if runs_natively([messages]):
        return native.load().redsync_open(sealed=messages, senders=senders, receiver=receiver)
    return reference.opened(messages, senders, receiver)
