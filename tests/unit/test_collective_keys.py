"""Instance keys of collectives when functions are traced once or repeatedly."""

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils

from tf_redsync.network import collectives


def launcher(group):
    keys = cross_device_utils.CollectiveKeys(group_key_start=group)
    keys.get_group_key(["CPU:0"])
    options = tf.distribute.experimental.CommunicationOptions()
    made = cross_device_utils.CollectiveReplicaLauncher(group, 1, keys, "CPU:0", options)
    made._next_instance_key = collectives.KeysOfLauncher(made)
    return made


def key_of_gather(one, value):
    """Returns the key that a launcher gives to an all-gather."""
    keys = one._next_instance_key
    return keys._describing("gather", lambda _: keys())(value)


def traced_keys(launchers, times=1, purpose=0, shape=(3,), name="step", loop=False):
    """Returns the keys of collectives in a traced function."""
    found = []

    def launch():
        for one in launchers:
            value = tf.zeros(shape)
            found.append(
                collectives._key(one, "gather", value, purpose)
                if purpose
                else key_of_gather(one, value)
            )

    def step():
        for _ in range(times):
            if loop:
                tf.while_loop(lambda i: i < 3, lambda i: (launch(), i + 1)[1:], [tf.constant(0)])
            else:
                launch()

    step.__name__ = name
    tf.function(step, autograph=False).get_concrete_function()
    return found


def test_key_is_stable_across_traces():
    first, again = launcher(5), launcher(5)
    again._next_instance_key._new_key_each_call = None  # must not be called
    for _ in range(3):
        traced_keys([first], name="evaluation", shape=(8,))
    assert traced_keys([first], times=2) == traced_keys([again], times=2)
    assert traced_keys([first], loop=True)[0] == traced_keys([again])[0]


def test_collisions_of_hashes(monkeypatch):
    """In a search over hundreds of models some of the 30-bit hashes are equal."""
    monkeypatch.setattr(collectives, "_lasting", {})
    monkeypatch.setattr(collectives.zlib, "crc32", lambda text: 2**30 - 2)
    one = launcher(5)
    keys = [traced_keys([one], purpose=purpose)[0] for purpose in (1, 2, 3)]
    assert keys == [2**31 - 2, 2**31 - 1, 2**30]
    assert [traced_keys([one], purpose=purpose)[0] for purpose in (1, 2, 3)] == keys


def test_distinct_collectives_have_distinct_keys():
    one, other_group = launcher(5), launcher(6)
    keys = [
        *traced_keys([one, other_group], times=3),
        *traced_keys([one], purpose=2),
        *traced_keys([one], shape=(4,)),
        *traced_keys([one], shape=(4, 1)),
        *traced_keys([one], name="another step"),
    ]
    assert len(set(keys)) == len(keys) == 10
    assert all(2**30 <= key < 2**31 for key in keys)  # TensorFlow counts up from 100


def test_collective_of_unknown_size_gets_a_new_key_per_call():
    one = launcher(5)
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(value):
        found.append(key_of_gather(one, value))

    step.get_concrete_function()
    assert found[0].op.type == "Placeholder"
    assert one._next_instance_key().numpy() != one._next_instance_key().numpy()  # eagerly


def keys_in_loop(one, shapes, again=0):
    """Returns the key of a collective in a loop for each shape, after tracing a few times."""

    @tf.function(autograph=False)
    def step(value):
        return tf.convert_to_tensor(key_of_gather(one, value))

    def loop(value):
        return tf.while_loop(lambda key: tf.equal(key, 0), lambda key: step(value), [0])

    for _ in range(again + 1):
        traced = tf.function(loop, input_signature=[tf.TensorSpec([None, None])], autograph=False)
        traced.get_concrete_function()
    return [int(traced(tf.zeros(shape))[0]) for shape in shapes]


def test_shape_determines_key_in_loop():
    """A constant key would have several shapes, and a counter would depend on traces."""
    shapes = [(4, 3), (2, 3), (6, 2), (3, 4), (4, 3), (0, 3)]
    keys = keys_in_loop(launcher(5), shapes)
    assert keys == keys_in_loop(launcher(5), shapes, again=2)
    assert keys[0] == keys[4] and len(set(keys)) == 5
    assert all(2**30 <= key < 2**31 for key in keys)
