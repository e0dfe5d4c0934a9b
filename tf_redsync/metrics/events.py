"""Scalars and histograms for TensorBoard, in a folder of the run directory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
            import tensorboard.summary  # noqa: F401  # what `tf.summary.histogram` is made of
        except ImportError as error:
            self._give_up(f"{error}: pip install 'tf_redsync[report]', or tensorboard")
            return
        try:
            self._writer = tf.summary.create_file_writer(self._folder)
        except (tf.errors.OpError, OSError) as error:
            self._give_up(str(error))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step, in one operation: `tf.summary.scalar` is one for each."""
        kind = tf.compat.v1.Summary
        found = kind(value=[kind.Value(tag=n, simple_value=v) for n, v in values.items()])
        with self._written_to(step):
            tf.summary.experimental.write_raw_pb(found.SerializeToString())

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Write distributions of numbers of a step, and all that waits to be written."""
        if self._writer is None:  # perhaps there is no TensorBoard, which they need even so
            return
        with self._written_to(step):
            for name, numbers in values.items():
                tf.summary.histogram(name, numbers)
            tf.summary.flush()

    @contextmanager
    def _written_to(self, step: int) -> Iterator[None]:
        writer = self._writer or tf.summary.create_noop_writer()
        try:
            with writer.as_default(step=step), tf.summary.record_if(self._writer is not None):
                yield
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
