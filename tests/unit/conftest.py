"""Several logical CPU devices, so that MirroredStrategy has replicas to synchronise."""

import functools

import pytest
import tensorflow as tf

LOGICAL_CPUS = 4

# Must happen before the first operation, hence here and not in a fixture.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS,
)


@functools.cache
def _strategy(replicas: int) -> tf.distribute.MirroredStrategy:
    # Strategies of one process number their collectives from the same start, and TensorFlow takes
    # two with one number for one. Its own tests move the start, too.
    numbered = type(
        "MirroredStrategy",
        (tf.distribute.MirroredStrategy,),
        {"_collective_key_base": 100_000 * replicas},
    )
    return numbered([f"CPU:{i}" for i in range(replicas)])


@pytest.fixture(scope="session")
def mirrored():
    """A function that returns the MirroredStrategy with so many replicas."""
    return _strategy
