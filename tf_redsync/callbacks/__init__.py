"""Callbacks for `fit` of Keras 3 and tf_keras."""

from __future__ import annotations

from tf_redsync.callbacks.checkpoint import Checkpoint
from tf_redsync.callbacks.flush import Flush
from tf_redsync.callbacks.metrics import CompressionMetrics
from tf_redsync.callbacks.prune import Prune

__all__ = ["Checkpoint", "CompressionMetrics", "Flush", "Prune"]
