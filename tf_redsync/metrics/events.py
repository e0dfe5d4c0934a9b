"""Scalars and histograms for TensorBoard, in a folder of the run directory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

FOLDER = "tensorboard"


class Events:
    """Writes event files. A failure is a warning, once, and then nothing is written.

    Args:
        directory: The run directory.
        rank: The worker's.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int):
        self._folder = str(Path(directory) / FOLDER / f"worker-{rank}")
        self._writer: Any = None
        try:
            import tensorboard.summary  # noqa: F401  # what `tf.summary.scalar` is made of
        except ImportError as error:
            self._give_up(f"{error}: pip install 'tf_redsync[report]', or tensorboard")
            return
        try:
            self._writer = tf.summary.create_file_writer(self._folder)
        except (tf.errors.OpError, OSError) as error:
            self._give_up(str(error))

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write numbers, and distributions of numbers, of a step."""
        if self._writer is None:
            return
        try:
            with self._writer.as_default(step=step), tf.summary.record_if(True):
                for name, value in scalars.items():
                    tf.summary.scalar(name, value)
                for name, values in (histograms or {}).items():
                    tf.summary.histogram(name, values)
            self._writer.flush()
        except (tf.errors.OpError, OSError) as error:
            self._give_up(str(error))

    def close(self) -> None:
        """Write no more."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except (tf.errors.OpError, OSError):  # said already, or nothing is lost
                pass

    def _give_up(self, why: str) -> None:
        self._writer = None
        warnings.warn(
            f"`CompressionMetrics` writes nothing for TensorBoard to {self._folder} ({why}). "
            "Training goes on, and so do its other outputs.",
            stacklevel=4,
        )
