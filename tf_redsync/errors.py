"""The base of the errors by which training on several workers ends."""

from __future__ import annotations


class DistributedError(RuntimeError):
    """Training on several workers cannot go on.

    Raised by `fit`, `evaluate`, `predict`, every `tf.function` and `strategy.run` when a worker is
    lost or stays away, when a message arrives corrupted, or when too many steps were skipped. The
    message says which worker, and where each one is. An error that TensorFlow has raised in the
    step is the `__cause__`, and its class is a base of this error's class: `except
    tf.errors.UnavailableError` catches it, too.

    Attributes:
        original: TensorFlow's error, or `None` where the library found the problem itself.
    """

    original: Exception | None = None
