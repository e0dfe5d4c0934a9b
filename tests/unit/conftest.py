"""Creates several logical CPU devices, so that MirroredStrategy has replicas to synchronize."""

import functools

import pytest

LOGICAL_CPUS = 4


def pytest_configure(config):
    """Creates the devices before the first TensorFlow operation, which a fixture could not do."""
    distributes = getattr(config.option, "dist", "no") != "no"
    if distributes and not hasattr(config, "workerinput"):
        return  # The pytest-xdist controller only distributes tests and needs no TensorFlow.
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS,
    )


@functools.cache
def _strategy(replicas: int):
    import tensorflow as tf

    # Strategies of one process number their collectives from the same start, and TensorFlow
    # confuses two with the same number. TensorFlow's own tests also move the start.
    numbered = type(
        "MirroredStrategy",
        (tf.distribute.MirroredStrategy,),
        {"_collective_key_base": 100_000 * replicas},
    )
    return numbered([f"CPU:{i}" for i in range(replicas)])


@pytest.fixture(scope="session")
def mirrored():
    """Returns a function that returns a MirroredStrategy with the given number of replicas."""
    return _strategy
