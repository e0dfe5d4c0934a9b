"""`rs.already_sharded`: what it takes, and what one worker gets of it."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs


def test_one_worker_gets_all_batches_as_they_are():
    data = tf.data.Dataset.from_tensor_slices(np.arange(10)).batch(4)
    for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("CPU:0")):
        batches = [np.array(b).tolist() for b in rs.already_sharded(data, strategy)]
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_is_no_dataset_is_refused():
    with pytest.raises(TypeError, match="(?s)`tf.data.Dataset`.*dataset="):
        rs.already_sharded(np.zeros(3), tf.distribute.get_strategy())
