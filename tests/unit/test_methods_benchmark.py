"""benchmarks/methods.py on two methods and few steps: rows, bits, what is timed, failures."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from benchmarks import method_settings, method_time, methods
from benchmarks.digits_task import WIDTHS
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec


def arguments(*flags):
    return methods.parse(["--steps", "40", "--side", "70", "--seconds", "0.05", *flags])


def test_rows_and_picture(tmp_path):
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


def test_a_failure_is_a_row_and_the_others_go_on(monkeypatch):
    make = method_settings.make

    def fail(name):
        if name == "TopK":
            raise ValueError("no such luck")
        return make(name)

    monkeypatch.setattr(method_settings, "make", fail)
    rows = methods.run(arguments("--methods", "TopK,NoExchange"))["methods"]
    assert rows["TopK"] == {"error": "ValueError: no such luck"}
    assert rows["NoExchange"]["bits"] == 0 and rows["NoExchange"]["compress_ms"] == 0
    assert "no such luck" in methods.table(rows)


def test_every_method_is_run_unless_told_otherwise():
    public = [getattr(rs.methods, name) for name in rs.methods.__all__]
    classes = {c.__name__ for c in public if isinstance(c, type) and c is not rs.Method}
    assert set(methods.parse([]).methods) == classes
    for name in classes:
        assert type(method_settings.make(name)).__name__ == name


def test_momentum_in_the_exchange_shortens_the_steps():
    assert method_settings.learning_rate(rs.Dense(), 0.2) == 0.2
    assert method_settings.learning_rate(rs.Dense(momentum=0.9), 0.2) == pytest.approx(0.02)


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
def test_what_is_timed_is_the_exchange(name, requests):
    """A replay with the answers that the loopback gave ends in the loopback's totals and state."""
    method, rng = method_settings.make(name), np.random.default_rng(0)
    layout = BucketLayout((TensorSpec("w", (40, 50)),), 3)
    grads = [[tf.constant(rng.standard_normal((40, 50)), tf.float32)] for _ in range(3)]
    states = loopback.initial_states(method, layout)
    recorder = method_time.Replies(method)
    step = loopback.run_step(recorder, layout, grads, states, 0)
    own = dataclasses.replace(layout, rank=tf.constant(0))
    assert len(recorder.kept) == requests
    inputs = (grads[0], states[0], tf.constant(0, tf.int64), recorder.kept)
    totals, state = method_time.replay(method, own, None)(*inputs)
    for found, expected in ((totals, step.totals[0]), (state, step.states[0])):
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    last = method_time.replay(method, own, requests - 1)(*inputs)
    sizes = [math.prod(t.shape) for t in tf.nest.flatten(last)]
    assert sizes == [math.prod(t.shape) for t in tf.nest.flatten(vars(step.requests[-1]))]
