"""TensorBoard events without TensorBoard installed."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tf_redsync.metrics.outputs import Events


def test_histograms_are_skipped_without_tensorboard(monkeypatch, tmp_path):
    """`tf.summary.histogram` would raise even without a writer."""

    def missing(*args, **kwargs):
        raise RuntimeError("TensorBoard is not installed")

    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    monkeypatch.setattr(tf.summary, "histogram", missing)
    with pytest.warns(UserWarning, match="cannot write TensorBoard events"):
        events = Events(tmp_path, 0)
    events.scalars(1, {"loss": 1.0})
    events.histograms(1, {"residual": np.ones(3)})
    assert list(tmp_path.iterdir()) == []
