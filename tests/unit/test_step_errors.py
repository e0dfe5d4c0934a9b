"""Errors of a step are raised as the library's own, in one process."""

import pickle

import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.cluster import step_errors, watchdog
from tf_redsync.errors import main_line
from tf_redsync.step.nonfinite import SkippedSteps

OF_SEVERAL = (
    "Graph execution error:\n\nDetected at node A defined at (most recent call last):\n"
    "Detected at node B defined at (most recent call last):\n2 root error(s) found.\n"
    "  (0) ABORTED:  worker 1 is gone\n\t [[{{node A}}]]\n  (1) CANCELLED:  later\n"
    "0 successful operations."
)


@pytest.fixture(autouse=True)
def installed():
    step_errors.install()
    step_errors.install()


def failing_step(fail):
    @tf.function
    def step():
        with tf.control_dependencies([fail()]):
            return tf.zeros([]) + 1.0

    return step


def skip_steps():
    raise SkippedSteps("3 steps in a row were skipped")


def test_error_of_the_library_in_a_step():
    step = failing_step(lambda: tf.py_function(skip_steps, [], []))
    with pytest.raises(SkippedSteps) as found:
        step()
    error = found.value
    assert str(error) == "3 steps in a row were skipped"
    assert isinstance(error, (rs.DistributedError, RuntimeError))
    assert isinstance(error, tf.errors.UnknownError) and error.message == str(error)
    assert type(error.__cause__) is tf.errors.UnknownError and error.original is error.__cause__
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert isinstance(again, SkippedSteps) and isinstance(again, tf.errors.UnknownError)


def test_failed_check_of_the_library_in_a_step():
    text = "received a corrupted message. Received by worker, from worker:"
    step = failing_step(lambda: tf.debugging.Assert(tf.random.uniform([]) > 1.0, [text, [0], [1]]))
    with pytest.raises(rs.DistributedError) as found:
        step()
    assert str(found.value) == f"{text} 0 1"


def test_other_errors_are_unchanged():
    def fail():
        raise ValueError("bad batch")

    with pytest.raises(tf.errors.InvalidArgumentError, match="bad batch") as found:
        failing_step(lambda: tf.py_function(fail, [], []))()
    assert not isinstance(found.value, rs.DistributedError) and found.value.__cause__ is None


@pytest.mark.parametrize("verdict", ["worker 1 does not answer", None])
def test_failed_collective_waits_for_the_verdict(monkeypatch, verdict):
    monkeypatch.setattr(watchdog, "verdict_after_loss", lambda: verdict)
    with pytest.raises(tf.errors.UnavailableError) as found, step_errors.translated():
        raise tf.errors.UnavailableError(None, None, "Socket closed")
    assert str(found.value) == (verdict or "Socket closed")
    assert isinstance(found.value, rs.DistributedError) == (verdict is not None)


def test_end_of_data_after_a_failure_in_the_background(monkeypatch):
    monkeypatch.setattr(step_errors, "_in_background", [])
    step_errors.fail_in_background(ValueError("no space"))
    queue, data = tf.queue.FIFOQueue(1, [tf.int32], [[]]), iter(tf.data.Dataset.range(0))
    queue.close()
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        tf.function(lambda: next(data))()
    with pytest.raises(ValueError, match="no space"):
        tf.function(queue.dequeue)()
    with pytest.raises(ValueError, match="no space"), step_errors.translated():
        queue.enqueue(1)


def test_most_informative_line_of_several_failed_ops():
    assert main_line(OF_SEVERAL) == "worker 1 is gone"
