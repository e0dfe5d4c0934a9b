"""`rs.already_sharded`: accepted datasets, and one worker's batches."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs


def test_one_worker_gets_all_batches_unchanged():
    data = tf.data.Dataset.from_tensor_slices(np.arange(10)).batch(4)
    for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("CPU:0")):
        batches = [np.array(b).tolist() for b in rs.already_sharded(data, strategy)]
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_non_dataset_is_rejected():
    with pytest.raises(TypeError, match="(?s)`tf.data.Dataset`.*dataset="):
        rs.already_sharded(np.zeros(3), tf.distribute.get_strategy())
