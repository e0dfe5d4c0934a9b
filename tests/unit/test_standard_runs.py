"""The queue of standard runs: order, learning rates, table, SIGKILL and pauses."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import nullcontext

import pytest

from benchmarks.accuracy import run_queue, standard_runs, time_to_accuracy
from benchmarks.accuracy.standard_runs import Arm, Setup, best_rate, runs_of, table

DIGITS = Setup(
    "digits", ("--workers", "2", "--schedule", "warm_cosine"), "steps", 90, 3, (0.02, 0.04),
    (Arm("dense", "Dense()"), Arm("gmc", "CodedGMC(density=0.1)")), 0.01, seeds=2,
)  # fmt: skip
MORE = Setup(
    "digits_4workers", ("--workers", "4"), "steps", 90, 3, (0.02, 0.04), DIGITS.arms, 0.01,
    seeds=1, rates_from="digits",
)  # fmt: skip
QUEUE = """
import sys
from benchmarks.accuracy import run_queue
from tests.unit.test_standard_runs import ONE
sys.exit(run_queue.main(sys.argv[1:], [ONE]))
"""
ONE = Setup(
    "one", ("--workers", "2", "--batch", "8"), "steps", 1500, 3, (0.02,),
    (Arm("gmc", "CodedGMC(density=0.1)"),), 0.01, seeds=0,
)  # fmt: skip


def write(folder, run, **row):
    content = {"settings": {}, "rows": [{"bits": 32.0, "processor_seconds": 360.0, **row}]}
    (folder / f"{run.name}.json").write_text(json.dumps(content))


def test_order_and_learning_rates(tmp_path):
    """The grids, each first one followed by a full baseline run; then seed after seed."""
    runs = list(runs_of([DIGITS, MORE], tmp_path))
    names = [run.name for run in runs]
    assert names == [
        "digits-dense-grid-0.02-seed0", "digits-dense-grid-0.04-seed0",
        "digits-dense-full-tuned-seed0",
        "digits-gmc-grid-0.02-seed0", "digits-gmc-grid-0.04-seed0",
        "digits-gmc-full-tuned-seed0",
        "digits-dense-full-tuned-seed1", "digits-gmc-full-tuned-seed1",
        "digits_4workers-dense-full-tuned-seed0", "digits_4workers-gmc-full-tuned-seed0",
    ]  # fmt: skip
    queue = run_queue.Queue([DIGITS, MORE], tmp_path)
    write(tmp_path, runs[0], metric=80.0)
    assert queue.next() == runs[1]
    assert run_queue.Queue([DIGITS, MORE], tmp_path, chosen={"digits_4workers"}).next() is None
    write(tmp_path, runs[1], curve={"steps": [10], "metric": [70.0]})  # has only started
    assert queue.next() == runs[1] and best_rate(DIGITS, DIGITS.arms[0], tmp_path) is None
    write(tmp_path, runs[1], metric=90.0)
    assert queue.next().name == "digits-dense-full-0.04-seed0"
    write(tmp_path, queue.next(), metric=91.0)
    write(tmp_path, runs[3], error="the loss is not finite")
    assert queue.next() == runs[4]
    write(tmp_path, runs[4], metric=70.0)
    assert [best_rate(DIGITS, arm, tmp_path) for arm in DIGITS.arms] == [0.04, 0.04]
    assert queue.next().name == "digits-gmc-full-0.04-seed0"
    write(tmp_path, runs[4], error="the loss is not finite")
    assert best_rate(DIGITS, DIGITS.arms[1], tmp_path) is None
    left = [run for run in runs_of([DIGITS, MORE], tmp_path) if run.rate and not run.grid]
    for run in left[1:]:
        assert run.arm.name == "dense" and queue.next() is not None
        write(tmp_path, run, metric=80.0)
    assert queue.next() is None


def test_command_lines(tmp_path):
    """The benchmark accepts the command of every standard run; grid runs are a third."""
    from benchmarks.accuracy import command_line

    own = [s for s in standard_runs.SETUPS if s.program == "benchmarks.convergence"]
    assert len(own) >= 6
    for setup in own:
        assert setup.length % 3 == setup.evaluations % 3 == 0
        for arm in setup.arms:
            for grid in (True, False):
                run = standard_runs.Run(setup, arm, setup.rates[0], 1, grid)
                args = command_line.parse(run.flags(tmp_path, None))
                settings = command_line.settings_of(args, 28_000)
                assert (args.methods, args.seed_list) == ([arm.method], [1])
                assert settings.workers * settings.batch in (16, 128)
                length = args.epochs if setup.unit == "epochs" else args.steps
                assert length == setup.length / (3 if grid else 1)


def test_pytorch_command_lines(monkeypatch, tmp_path):
    """The settings equal those of the arm that it is compared with."""
    from benchmarks.accuracy import command_line

    for name in ("torch", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    program = importlib.import_module("benchmarks.accuracy.pytorch")
    monkeypatch.delitem(sys.modules, program.__name__)  # contains the empty module
    named = {setup.name: setup for setup in standard_runs.SETUPS}
    setup, own = named["resnet9_pytorch"], named["resnet9"]
    assert setup.program == program.__name__
    for arm in setup.arms:
        flags = standard_runs.Run(setup, arm, 0.2, 1, False).flags(tmp_path, "y")
        args = program.parse(["--threads", "1", *flags])
        assert (args.methods, args.seed) == (arm.method, 1)
        found = dataclasses.asdict(program.settings_of(args, 50_000))
        flags = standard_runs.Run(own, own.arms[0], 0.2, 1, False).flags(tmp_path, None)
        other = command_line.settings_of(command_line.parse(flags), 50_000)
        assert found == {**dataclasses.asdict(other), "real": True}
    rates = other.rate()
    for step in (0, 1, 467, 468, 469, 2000, 4679):
        assert program.rate(other, step) == pytest.approx(float(rates(step)), abs=1e-7)


def test_table_and_list(tmp_path):
    setups = [DIGITS, MORE]
    assert table(setups, tmp_path) == ""
    for run in (r for r in list(runs_of(setups, tmp_path)) if r.grid):
        write(tmp_path, run, metric=50.0 + 100 * run.rate)
    for run in [r for r in runs_of(setups, tmp_path) if not r.grid][:3]:
        metric = 90.0 + 2 * run.seed - (run.arm.name == "gmc")
        write(tmp_path, run, metric=metric, curve={"steps": [90], "metric": [metric]})
    lines = table(setups, tmp_path).splitlines()
    assert lines[0] == "**digits**" and len(lines) == 6
    listed = run_queue.listing(setups, tmp_path).splitlines()
    assert len(listed) == 11 and sum("done: " in line for line in listed) == 7
    assert "0.10 h" in listed[2] and "no learning rate" not in "".join(listed)
    assert listed[-1] == "0.0 core-hours are left"  # three of 0.01
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines[4:]]
    assert cells[0] == [
        "`Dense()`", "0.04*", "2", "91.00", "1.41", "+0.00", "32.000", "0.02: 52.00; 0.04: 54.00"
    ]  # fmt: skip
    assert cells[1][2:6] == ["1", "89.00", "-", "-1.00"]  # to dense with the same seed
    full = [run for run in runs_of(setups, tmp_path) if run.setup is DIGITS and not run.grid]
    for run in full:
        if run.seed == 1:
            write(tmp_path, run, error="the loss is not finite")
    lines = table(setups, tmp_path).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines[4:]]
    assert [row[2:6] for row in cells] == [
        ["1, 1 diverged", "90.00", "-", "+0.00"], ["1, 1 diverged", "89.00", "-", "-1.00"]
    ]  # fmt: skip
    write(tmp_path, next(r for r in full if r.arm.name == "gmc"), error="the loss is not finite")
    assert "| 0, 2 diverged | - | - | - | - |" in table(setups, tmp_path)


@pytest.fixture
def queue(tmp_path):
    """Starts queues in separate processes, as a user would."""
    started = []

    def start(folder, *flags):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", QUEUE, "--folder", str(folder), "--run", *flags]
        root = run_queue.ROOT
        started.append(subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": root}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(what, seconds=120.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(process):
    path = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(path) as file:
        return [int(pid) for pid in file.read().split()]


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


@pytest.mark.deep  # of the benchmark's queue; commits run the tests above
def test_killed_paused_and_resumed_runs_are_bitwise_equal(tmp_path, queue):
    """Killing a queue between two evaluations kills its run; the next queue resumes it."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    name = "one-gmc-grid-0.02-seed0"
    state, log = folder / f"{name}.state.npz", folder / f"{name}.log"
    first = queue(folder, "--save_seconds", "0.02")
    wait_for(state.exists)
    (folder / "PAUSE").touch()
    (run,) = children(first)
    wait_for(lambda: state_of(run) == "T")
    with pytest.raises(RuntimeError, match="another queue trains in this folder"):
        run_queue.Queue([ONE], folder).train()
    first.send_signal(signal.SIGKILL)
    wait_for(lambda: state_of(run) in ("gone", "Z"))
    assert not (folder / f"{name}.json").exists() or not standard_runs.done(
        standard_runs.row_of(next(runs_of([ONE], folder)), folder)
    )
    (folder / "PAUSE").unlink()
    second = queue(folder)
    other = queue(whole)
    assert second.wait(120) == other.wait(120) == 0
    assert "resumes at step" in log.read_text()
    rows = [standard_runs.row_of(next(runs_of([ONE], f)), f) for f in (folder, whole)]
    for key in ("metric", "loss", "bits", "sent_bytes", "curve"):
        assert rows[0][key] == rows[1][key], key
    assert rows[0]["commit"] == rows[1]["commit"] and not state.exists()


def test_page_shows_the_rows():
    """docs/accuracy.md has the table of each setup with a full run, the archive those of grids."""
    docs = run_queue.ROOT / "docs"
    rows = docs / "accuracy" / "standard"
    page = (docs / "accuracy.md").read_text(encoding="utf-8")
    archive = (docs / "archive" / "accuracy.md").read_text(encoding="utf-8")
    full = {
        setup.name for setup in standard_runs.SETUPS if list(rows.glob(f"{setup.name}-*-full-*"))
    }
    assert "resnet9" in full
    for part in table(standard_runs.SETUPS, rows).split("\n\n**"):
        name, lines = part.removeprefix("**").split("**\n\n")
        assert lines in (page if name in full else archive), name
    control = [
        rows.parent / "resnet9_dense_on_cpus.json",
        rows / "resnet9-dense-full-0.4-seed0.json",
    ]
    on_cpus, on_gpu = (json.loads(path.read_text())["rows"][0] for path in control)
    assert (on_cpus["device"], on_gpu["device"]) == ("CPU", "NVIDIA H200")
    assert (
        f"{on_cpus['metric']:.2f} % on CPUs" in page and f"{on_gpu['metric']:.2f} % on the" in page
    )


def test_page_shows_the_accuracies_above_the_grid():
    """The grid's highest rate is the best of dense training, so the page shows the next one."""
    docs = run_queue.ROOT / "docs"
    page = " ".join((docs / "accuracy.md").read_text(encoding="utf-8").split())
    found = {
        path.name.split("-")[1]: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((docs / "accuracy" / "rate_0.8").glob("resnet9-*-grid-0.8-seed0.json"))
    }
    metric = {arm: f"{content['rows'][0]['metric']:.2f}" for arm, content in found.items()}
    assert (
        f"`Dense` has {metric['dense']} after 4 epochs, `HalfPrecision` {metric['half']}, "
        f"`CodedGMC` {metric['codedgmc3']} (3 %) and {metric['codedgmc10']} (10 %)"
    ) in page
    assert {content["settings"]["learning_rate"] for content in found.values()} == {0.8}


@pytest.mark.parametrize("name", ["resnet9", "gpt"])
def test_archive_shows_the_minutes(name):
    docs = run_queue.ROOT / "docs"
    paths = sorted((docs / "accuracy" / "steps").glob(f"{name}_*_workers_*.json"))
    reports = [time_to_accuracy.flat(json.loads(p.read_text(encoding="utf-8"))) for p in paths]
    setup = next(setup for setup in standard_runs.SETUPS if setup.name == name)
    found = time_to_accuracy.courses(setup, docs / "accuracy" / "standard", reports)
    text = (docs / "archive" / "accuracy.md").read_text(encoding="utf-8")
    assert len(found) >= 6 and time_to_accuracy.table(found) in text


def test_minutes_to_an_accuracy(tmp_path):
    """Means over the seeds, interpolated between evaluations."""
    for run in (r for r in list(runs_of([DIGITS], tmp_path)) if r.grid):
        write(tmp_path, run, metric=50.0)
    for run in [r for r in runs_of([DIGITS], tmp_path) if not r.grid]:
        last = 100.0 if run.arm.name == "dense" else 96.0
        metric = [50.0, 90.0 + 2 * run.seed, last]
        write(tmp_path, run, metric=last, curve={"steps": [30, 60, 90], "metric": metric})
    report = {"rate": "1gbit", "workers": 2, "model": "resnet9", "batch": 32, "methods": {
        "Dense()": {"step_ms": 1.0, "step_ms_mean": 1000.0},
        "CodedGMC(density=0.1)": {"step_ms": 1.0, "step_ms_mean": 500.0},
        "none": {"step_ms": 1.0, "step_ms_mean": 100.0},
    }}  # fmt: skip
    setups = [DIGITS, MORE]
    assert not time_to_accuracy.courses(MORE, tmp_path, [{**report, "workers": 4}], setups)
    found = time_to_accuracy.courses(DIGITS, tmp_path, [report], setups)
    assert [(c.method, c.seeds, c.metric[1]) for c in found] == [
        ("Dense()", 2, 91.0), ("CodedGMC(density=0.1)", 2, 91.0)
    ]  # fmt: skip
    dense, gmc = found
    assert dense.minutes_to(91.0) == 1.0 and dense.minutes_to(95.5) == 1.25
    assert gmc.minutes == [0.25, 0.5, 0.75] and gmc.minutes_to(98.0) is None
    assert gmc.minutes_to(50.0) == 0.25
    lines = time_to_accuracy.table(found).splitlines()
    assert lines[3].endswith("| 2 | 500 | - | - |") and "| 1.4 | 1.5 |" in lines[2]
    time_to_accuracy.plot(found, tmp_path / "minutes.png")
    assert (tmp_path / "minutes.png").stat().st_size > 5000
    # The goal is dense training's also in reports without its step time.
    del report["methods"]["Dense()"]
    (alone,) = time_to_accuracy.courses(DIGITS, tmp_path, [report], setups)
    assert alone.goals == dense.goals
    assert time_to_accuracy.table([alone]).splitlines()[2:] == lines[3:]


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ({"workers": 4, "batch": 32}, None),
        ({"workers": 2, "batch": 64}, None),
        ({"workers": 2, "batch": 32}, "4 x 32.* 2 workers with batch=32; .* --batch 64"),
        ({"workers": 4, "batch": 32, "model": "vgg"}, "model=resnet9.*model=vgg"),
    ],
)
def test_measured_steps_have_the_global_batch_of_the_runs(tmp_path, report, problem):
    report = {"model": "resnet9", "rate": "1gbit", "methods": {}, **report}
    expectation = pytest.raises(ValueError, match=problem) if problem else nullcontext()
    with expectation:
        assert not time_to_accuracy.courses(standard_runs.SETUPS[0], tmp_path, [report])


def test_pytorch_minutes(tmp_path):
    """Step times come from a report of the peers; the accuracy is that of the same algorithm."""
    for run in (r for r in list(runs_of([DIGITS], tmp_path)) if r.grid):
        write(tmp_path, run, metric=50.0)
    for run in [r for r in runs_of([DIGITS], tmp_path) if not r.grid]:
        write(tmp_path, run, metric=90.0, curve={"steps": [30, 90], "metric": [40.0, 90.0]})
    own = {"none": {"step_ms_mean": 1.0}, "Dense()": {"step_ms": 1.0, "step_ms_mean": 1000.0}}
    other = {"none": {"step_ms": 1.0}, "dense": {"step_ms": 1.0, "step_ms_mean": 500.0}}
    report = {"rate": "1gbit", "workers": 2, "model": "resnet9", "peers": {
        "tf_redsync": {"batch": 32, "methods": own},
        "pytorch": {"batch": 32, "methods": {**other, "fp16": {"error": "x"}}},
    }}  # fmt: skip
    flat = time_to_accuracy.flat(report)
    found = time_to_accuracy.courses(DIGITS, tmp_path, [flat], [DIGITS])
    assert [(c.method, c.step_ms) for c in found] == [("Dense()", 1000.0), ("PyTorch dense", 500.0)]
    assert found[1].minutes_to(90.0) == 0.75
    one = {**report, "peers": {"pytorch": report["peers"]["pytorch"]}}
    assert time_to_accuracy.flat(one)["batch"] == 32
    both = time_to_accuracy.courses(DIGITS, tmp_path, [{**flat, "rate": "none"}, flat], [DIGITS])
    assert [c.network[:6] for c in both] == ["1 Gbit", "1 Gbit", "none, ", "none, "]


def test_minutes_to_a_perplexity(tmp_path):
    """Smaller is better: 98 % of dense is its perplexity divided by 0.98."""
    steps = [100.0, 200.0, 300.0]
    metric = [9.0, 6.0, 4.9]
    dense = time_to_accuracy.Course("1 Gbit/s", "Dense()", 600.0, steps, metric, 1, 4.9, -1)
    assert dense.goals == pytest.approx([5.0, 4.9 / 0.995])
    assert dense.minutes_to(6.0) == 2.0 and dense.minutes_to(7.5) == 1.5
    assert dense.minutes_to(4.8) is None
    lines = time_to_accuracy.table([dense]).splitlines()
    assert "minutes to a perplexity of 5.00" in lines[0] and "| 2.9 | 3.0 |" in lines[2]
    time_to_accuracy.plot([dense], tmp_path / "minutes.png")
    assert (tmp_path / "minutes.png").stat().st_size > 5000
