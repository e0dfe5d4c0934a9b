"""`heartbeat_seconds` and its variable: the time after which a silent worker is lost."""

import types

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync import environment
from tf_redsync.cluster import stall_detector, watchdog


def test_argument_overrides_the_variable(monkeypatch):
    monkeypatch.delenv(environment.HEARTBEAT, raising=False)
    assert watchdog.heartbeat(None) is None and watchdog.heartbeat(90) == 90
    monkeypatch.setenv("TF_REDSYNC_HEARTBEAT_SECONDS", "240")
    assert watchdog.heartbeat(None) == 240.0 and watchdog.heartbeat(90) == 90


def test_seconds_of_numpy():
    for value in (np.int64(60), np.float32(60)):
        seconds = watchdog.heartbeat(value)
        assert seconds == 60 and type(seconds) is float
        assert environment.seconds("start_timeout", value, environment.START_TIMEOUT) == 60


@pytest.mark.parametrize("value", ["5", "nan", "a minute", "-60"])
def test_bad_variable_is_named(monkeypatch, value):
    monkeypatch.setenv("TF_REDSYNC_HEARTBEAT_SECONDS", value)
    with pytest.raises(ValueError, match=f"TF_REDSYNC_HEARTBEAT_SECONDS.*Received.*{value}"):
        rs.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("value", [5, 0, -1.0, float("nan"), True, "60"])
def test_bad_argument_is_named(monkeypatch, value):
    monkeypatch.delenv(environment.HEARTBEAT, raising=False)
    with pytest.raises(ValueError, match=f"`heartbeat_seconds`.*heartbeat_seconds={value!r}"):
        rs.MultiWorkerMirroredStrategy(heartbeat_seconds=value)


@loop(
    ("timeout", "heartbeat", "lost", "silent"),
    [(600.0, None, 60, 30), (600.0, 240.0, 240, 120), (5.0, None, 35, 30), (None, 40.0, 40, 20)],
)
def test_watchdog_reports_before_tensorflow(monkeypatch, timeout, heartbeat, lost, silent):
    """After half of the user's timeout, the watchdog reports causes and steps."""
    assert watchdog.lost_after(timeout, heartbeat) == lost
    strategy = tf.distribute.get_strategy()
    detector = stall_detector.StallDetector(range(2), 1.0, bool, bool)
    monkeypatch.setattr(watchdog.strategies, "process_count", lambda strategy: 2)
    monkeypatch.setattr(watchdog.strategies, "is_redsync_strategy", lambda strategy: True)
    monkeypatch.setattr(watchdog.step_counters, "_counters", {})
    monkeypatch.setattr(watchdog._process, "thread", types.SimpleNamespace(detector=detector))
    watchdog.start(strategy, timeout, heartbeat)
    assert (detector.timeout_seconds, detector.silent_seconds) == (timeout, silent)
    assert silent < lost


def test_no_limit_without_a_watchdog():
    assert watchdog.lost_after(None, None) is None
