"""Several logical CPU devices, so that MirroredStrategy has replicas to synchronise."""

import functools

import pytest

LOGICAL_CPUS = 4


def pytest_configure(config):
    """Make the devices before the first operation, hence here and not in a fixture."""
    distributes = getattr(config.option, "dist", "no") != "no"
    if distributes and not hasattr(config, "workerinput"):
        return  # This process only hands out tests: it needs no TensorFlow.
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS,
    )


@functools.cache
def _strategy(replicas: int):
    import tensorflow as tf

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
