"""methods/methods.py with two methods and few steps: rows, bits, timing, failures."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from benchmarks import method_settings
from benchmarks.methods import method_time, methods
from benchmarks.methods.digits_task import WIDTHS, Digits
from benchmarks.methods.digits_training import Training, train
from tests.methods import METHODS
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec


def arguments(*flags):
    return methods.parse(["--steps", "40", "--side", "70", "--seconds", "0.05", *flags])


def test_rows_and_plot(tmp_path):
    report = methods.run(arguments("--methods", "Dense,TopK"))
    rows = json.loads(json.dumps(report))["methods"]
    assert set(rows) == {"Dense", "TopK"}
    for row in rows.values():
        assert np.isfinite(row["losses"]).all() and row["skipped"] == 0
        assert row["losses"][-1] == row["loss"] < 0.6 * row["losses"][0]
        assert 0.5 < row["accuracy"] <= 1
        assert row["compress_ms"] > 0 and row["decompress_ms"] >= 0
    kernels = [n * m for n, m in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)]
    elements = sum(kernels) + sum(WIDTHS[1:])
    assert report["elements"] == elements
    assert rows["Dense"]["bits"] == 32
    assert rows["Dense"]["sent_bytes"] == pytest.approx(2 * 3 / 4 * 4 * elements)
    gathered = 4 * (1 + sum(1 + 2 * round(0.01 * n) for n in kernels))
    reduced = 4 * sum(WIDTHS[1:])
    assert rows["TopK"]["bits"] == pytest.approx(8 * (gathered + reduced) / elements)
    assert rows["TopK"]["sent_bytes"] == pytest.approx(3 * gathered + 1.5 * reduced)
    assert "TopK" in methods.table(rows)
    methods.plot(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_failure_is_a_row_and_the_others_continue(monkeypatch):
    make = method_settings.make

    def fail(name, threshold):
        if name == "TopK":
            raise ValueError("no such luck")
        return make(name, threshold)

    monkeypatch.setattr(method_settings, "make", fail)
    rows = methods.run(arguments("--methods", "TopK,NoExchange"))["methods"]
    assert rows["TopK"] == {"error": "ValueError: no such luck"}
    assert rows["NoExchange"]["bits"] == 0 and rows["NoExchange"]["compress_ms"] == 0
    assert "no such luck" in methods.table(rows)


def test_all_methods_run_by_default():
    assert set(methods.parse([]).methods) == METHODS.keys()
    for name in METHODS:
        assert type(method_settings.make(name, 0.5)).__name__ == name


def test_settings():
    rate = method_settings.learning_rate
    assert rate(rs.Dense(), 0.2, 0.002) == 0.2
    assert rate(rs.Dense(momentum=0.9), 0.2, 0.002) == pytest.approx(0.02)
    assert rate(rs.contrib.Signum(momentum=0.9), 0.2, 0.002) == 0.002
    assert method_settings.make("Strom", 0.5) == rs.contrib.Strom(
        threshold=0.5, density=0.01, dense_below=4096
    )
    assert method_settings.make("TwoBit", 0.5).threshold == rs.contrib.TwoBit().threshold
    assert method_settings.make("RedSync", 0.5, 0.1, 16) == rs.RedSync(density=0.1, dense_below=16)
    assert method_settings.setting_of("Signum").votes
    assert not method_settings.setting_of("TopK").votes
    assert set(method_settings.EXCEPTIONS) <= set(method_settings.names())


def train_method(method, steps):
    return train(Digits(workers=4, batch=8), method, 0.1, steps)


@pytest.mark.deep  # `test_rows_and_plot` runs in every commit
def test_exchange_schedule_of_methods():
    """Counts requests of local steps, periodic full gradients and dense warm-ups."""
    dense = train_method(rs.Dense(), 24)
    one_step = train_method(rs.LocalSGD(steps=1), 24)
    np.testing.assert_allclose(one_step["losses"], dense["losses"], rtol=1e-4)
    assert one_step["bits"] == dense["bits"] == 32
    rounds = train_method(rs.LocalSGD(steps=4), 24)
    assert rounds["bits"] == 8 and rounds["loss"] < 0.95 * rounds["losses"][0]

    elements = Digits(workers=4).elements
    biases, heads = sum(WIDTHS[1:]), 32 * 5  # a flag, and at most a scale for each of three tensors
    late = train_method(rs.CDSGD(full_every=4, warm_up=None, dense_below=16), 24)
    expected = ((elements - biases) * (2 * 3 + 32) / 4 + 32 * biases) / elements
    assert expected <= late["bits"] <= expected + heads / elements
    # Synchronous SGD in the warm-up, and then only the requests of the other 16 steps.
    warm = train_method(rs.CDSGD(full_every=4, warm_up=rs.DenseWarmUp(8), dense_below=16), 24)
    np.testing.assert_allclose(warm["losses"][:8], dense["losses"][:8], rtol=1e-4)
    assert expected <= warm["bits"] <= expected + heads / elements


def test_delay_is_compensated():
    """If everything is sent, the workers' mean point equals that without a delay."""
    task = Digits(workers=4, batch=8)
    delayed = Training(task, rs.CDSGD(full_every=1, warm_up=None), 0.1)
    rows = task.batches(2)
    delayed.step(tf.constant(rows[0]), 0)
    for weight, start in zip(delayed.weights, task.weights(), strict=True):
        np.testing.assert_array_equal(weight, start)  # a total of 0
    undelayed = Training(task, rs.Dense(), 0.1)
    undelayed.step(tf.constant(rows[0]), 0)
    for i, weight in enumerate(undelayed.weights):
        mean = np.mean([point[i] for point in delayed.points], axis=0)
        np.testing.assert_allclose(mean, weight, rtol=0, atol=1e-6)
    delayed.step(tf.constant(rows[1]), 1)
    for weight, expected in zip(delayed.weights, undelayed.weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--methods", "Dense,Zip"), "`--methods` must be different names.*--methods=Dense,Zip"),
        (("--methods", "Dense,Dense"), "must be different names"),
        (("--steps", "0"), "`--steps` must be at least 1. Received: --steps=0"),
    ],
)
def test_bad_arguments(flags, message, capsys):
    with pytest.raises(SystemExit):
        methods.parse(flags)
    lines = " ".join(capsys.readouterr().err.split())
    assert re.search(message, lines)


@pytest.mark.parametrize(("name", "requests"), [("SparDL", 2), ("PowerSGD", 2), ("TopK", 1)])
def test_timed_replay_equals_the_exchange(name, requests):
    """A replay of the loopback's answers ends with the loopback's totals and state."""
    method, rng = method_settings.make(name, 0.5), np.random.default_rng(0)
    layout = BucketLayout((TensorSpec("w", (40, 50)),), 3)
    grads = [[tf.constant(rng.standard_normal((40, 50)), tf.float32)] for _ in range(3)]
    states = loopback.initial_states(method, layout)
    recorder = method_time.Replies(method)
    step = loopback.run_step(recorder, layout, grads, states, 0)
    assert len(recorder.kept) == requests
    inputs = (grads[0], states[0], tf.constant(0, tf.int64), recorder.kept)
    made, (totals, state) = method_time.replay(method, layout, None)(*inputs)
    for found, expected in ((totals, step.totals[0]), (state, step.states[0])):
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    only_made, nothing = method_time.replay(method, layout, requests)(*inputs)
    assert nothing == () and len(made) == len(only_made) == requests
    for found, again, request in zip(made, only_made, step.requests, strict=True):
        expected = {name: field for name, field in vars(request).items() if name != "sent"}
        for a, b, c in zip(*map(tf.nest.flatten, (found, again, expected)), strict=True):
            if c is None:  # a request of unknown size
                assert a is None and b is None
                continue
            np.testing.assert_allclose(a, c, rtol=0, atol=1e-5)
            np.testing.assert_allclose(b, c, rtol=0, atol=1e-5)
