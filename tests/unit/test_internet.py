"""benchmarks/scale/internet.py: step times predicted from a report, next to measured ones."""

import json

import pytest

from benchmarks.models import WORKLOADS
from benchmarks.scale import internet
from tf_redsync.auto import probe
from tf_redsync.auto.cost import Work

RATE = 1448 / 1514 * 10e6 / 8  # message bytes per second at 10 Mbit/s


def report(workers=2, threads=1, methods=None):
    measured = {"none": 20.0, "Dense()": 900.0, "DiLoCo(steps=50)": 38.0} | (methods or {})
    return {
        "workers": workers,
        "threads": threads,
        "rate": "10mbit",
        "latency_ms": 50.0,
        "model": "mlp",
        "methods": {name: {"step_ms_mean": ms} for name, ms in measured.items()},
    }


@pytest.fixture(autouse=True)
def no_computation(monkeypatch):
    monkeypatch.setattr(probe, "work", lambda method, workers: Work(0.004))


def all_reduce(workers):
    """Returns the seconds to all-reduce all weights, one bucket after the other."""
    sizes = [int(v.value.numpy().size) for v in WORKLOADS["mlp"].build().trainable_variables]
    sent = 2 * (workers - 1) / workers * 4 * sum(sizes) / RATE
    return sent, (1 + 2 * (workers - 1)) * 0.025


@pytest.mark.parametrize("workers", [2, 4])
def test_time_model(workers):
    """Workers share cores: four single-threaded ones on two cores take twice as long."""
    reports = [report(workers)]
    dense, local = internet.check(internet.model_of(reports), reports, cores=2)
    sent, latencies = all_reduce(workers)
    buckets = (dense["predicted_ms"] / 1e3 - 0.02 - sent) / (latencies + 0.004 * workers / 2)
    assert buckets == pytest.approx(round(buckets)) and 1 <= round(buckets) <= 8
    exchange = dense["predicted_ms"] / 1e3 - 0.02
    assert local["predicted_ms"] / 1e3 == pytest.approx(0.02 + exchange / 50)
    assert dense["error"] == pytest.approx(dense["predicted_ms"] / 900.0 - 1.0)


def test_tables_and_a_plot(tmp_path, capsys):
    for workers in (2, 4):
        (tmp_path / f"{workers}.json").write_text(json.dumps(report(workers)))
    files = [str(tmp_path / f"{p}.json") for p in (2, 4)]
    plot = tmp_path / "internet.png"
    assert internet.main(["--measured", *files, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "| method | 10mbit, 2 workers | 10mbit, 4 workers |" in out
    assert "| `DiLoCo(steps=50)` | 38.0 (" in out and "of 4 predictions" in out
    assert "Predicted ms at 10mbit and 50 ms" in out and "| 2 | 4 | 8 | 16 | 32 | 64 |" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_report_without_isolated_step(tmp_path, capsys):
    wrong = report()
    del wrong["methods"]["none"]
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    assert internet.main(["--measured", str(tmp_path / "wrong.json")]) == 1
    assert "each with the method `none`" in capsys.readouterr().err
