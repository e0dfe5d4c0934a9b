"""benchmarks/step/memory.py: its arithmetic, its table, the measurement in a worker."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import workers
from benchmarks.step import memory, memory_worker


def result(peak, process):
    known = {"params": 100, "slots": 8, "exchange": 192, "data": 10}
    sizes = {"rest": 310, "peak": peak, "process_base": 1000, "process_peak": process}
    return {"known": known, "skipped": 0, **sizes}


def test_units_and_differences(monkeypatch):
    def measure(module, lab, flags, timeout, env):
        assert module == "benchmarks.step.memory_worker" and len(lab.addresses) == 2
        assert env["MALLOC_MMAP_THRESHOLD_"] == "131072"
        if flags["method"] == "TopK":
            raise workers.MeasurementError(
                "`TopK` failed. worker 0:\n    ValueError: no such luck\n"
            )
        return result(*{"dense": (310, 1500), "redsync": (510, 1700)}[flags["method"]])

    monkeypatch.setattr(workers, "measure", measure)
    rows = memory.run(memory._parse(["--methods", "dense,redsync,TopK"]))["methods"]
    assert {k: rows["redsync"][k] for k in ("state", "kept", "peak", "process")} == {
        "state": 2.0, "kept": 3.0, "peak": 5.0, "process": 7.0,
    }  # fmt: skip
    lines = [line.split() for line in memory.table(rows).splitlines()]
    assert lines[2] == ["redsync", "2.000", "3.000", "5.000", "-", "+2.000", "7.000", "+2.000"]
    assert " ".join(lines[3]) == "TopK failed: ValueError: no such luck"


def test_skipped_steps_are_a_failure(monkeypatch):
    monkeypatch.setattr(workers, "measure", lambda *_, **__: result(310, 1500) | {"skipped": 2})
    rows = memory.run(memory._parse(["--methods", "redsync"]))["methods"]
    assert "skipped 2 steps" in rows["redsync"]["error"]


def test_worker_measurement():
    assert memory_worker.variable_bytes([tf.Variable(tf.zeros([3, 5])), tf.Variable(1)]) == 64
    before = memory_worker.process_bytes("VmRSS")
    block = np.ones(50_000_000)
    assert memory_worker.process_bytes("VmHWM") - before > 350e6
    del block
    memory_worker.reset_process_peak()
    assert memory_worker.process_bytes("VmHWM") - before < 100e6
    with pytest.raises(RuntimeError, match="has no VmNone"):
        memory_worker.process_bytes("VmNone")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--methods", "best"], "unknown best"),
        (["--steps", "0"], "`--steps` must be at least 1"),
        (["--timeout", "nan"], "`--timeout` must be finite and above 0. Received: --timeout=nan"),
        (["--json", "no/such.json"], "`--json` must be a file in an existing directory"),
    ],
)
def test_bad_arguments(capsys, args, words):
    with pytest.raises(SystemExit) as exit_:
        memory.main(args)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
