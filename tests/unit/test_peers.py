"""The benchmark of other libraries, without installing them: commands, rounds, report."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import netlab, workers
from benchmarks.models import initial_weights
from benchmarks.peers import __main__ as driver
from benchmarks.peers import common, environments, horovod_tf, mwms, pytorch_ddp, report, runs

ROOT = Path(__file__).resolve().parents[2]
FAKE = common.Peer(
    name="fake", module="tests.unit.fake_peer", methods=("none", "dense"), installs=()
)
PLACE = common.Cluster(1, 3, "10.0.0.2", "10.0.0.1", 700, "eth0")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def arguments(*flags):
    return driver.parse(["--rate", "none", "--steps", "3", "--warmup", "3", "--batch", "2", *flags])


def result(times=(1.0, 2.0, 9.0), logits=(1.0, 2.0), wire=4e6, **more):
    return {
        "times_ms": list(times),
        "bytes_per_step": None,
        "wire_bytes_per_step": wire,
        "cpu_ms_per_step": 7.0,
        "params": 5,
        "batch": 2,
        "logits": [list(logits)],
        "versions": {"lib": "3.1"},
        "settings": {"rank": 4},
        **more,
    }


# --------------------------------------------------------------------------------- command lines


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peers", "pytorch,jax"], "`--peers` must be different names out of tf_redsync, mwms"),
        (["--peers", "mwms,mwms"], "--peers=mwms,mwms"),
        (["--peers", ","], "--peers=,"),
        (["--warmup", "2"], "`--warmup` must be at least 3"),
        (["--steps", "0"], "`--steps` must be at least 1. Received: --steps=0"),
        (["--rate", "fast"], "`rate` must be none, or like 100mbit"),
        (["--model", "lstm"], "lstm"),
    ],
)
def test_bad_arguments(flags, words, capsys):
    with pytest.raises(SystemExit):
        driver.parse(flags)
    assert words in " ".join(capsys.readouterr().err.split())


def test_all_peers_are_measured_by_default():
    args = driver.parse([])
    assert args.peers == ["tf_redsync", "mwms", "pytorch", "horovod"]
    assert Path(args.venvs) == ROOT / "build" / "peers"
    assert driver.parse(["--peers", "horovod, mwms"]).peers == ["horovod", "mwms"]
    for peer in runs.OTHERS.values():
        assert peer.methods[:2] == ("none", "dense")
        assert (ROOT / (peer.module.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize("module", [pytorch_ddp, horovod_tf, mwms])
def test_workers_parse_the_drivers_command(module):
    peer, args = module.peer(), arguments("--model", "vgg")
    for method in peer.methods:
        words = runs.command(Path("/venv/bin/python"), peer, method, args, "/out")
        assert words[:3] == ["/venv/bin/python", "-m", peer.module]
        parsed = common.arguments(module.METHODS, words[3:])
        assert vars(parsed) == {
            "method": method,
            "model": "vgg",
            "steps": 3,
            "warmup": 3,
            "batch": 2,
            "seed": 0,
            "output": "/out",
        }
    default = driver.parse(["--rate", "none"])
    assert "--batch" not in runs.command(Path("p"), peer, "none", default, "/out")


def test_workers_import_only_what_their_environment_has():
    """Of the installed packages only NumPy; a worker imports the rest when it starts."""
    code = "import sys; before = set(sys.modules)\n"
    for name in ("common", "pytorch_ddp", "horovod_tf", "mwms"):
        code += f"import benchmarks.peers.{name}\n"
    code += "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
    code += "print(*sorted(new - set(sys.stdlib_module_names)))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    public = [name for name in done.stdout.split() if not name.startswith("_")]
    assert public == ["benchmarks", "numpy"]


# -------------------------------------------------------------------------------------- workers


def test_worker_rank_and_address():
    workers = ["10.0.0.1:700", "10.0.0.2:800", "10.0.0.3:900"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    env = {"TF_CONFIG": json.dumps(config), "TF_REDSYNC_BENCH_INTERFACE": "eth0"}
    assert common.cluster(env) == PLACE
    assert common.cluster({**env, "TF_REDSYNC_BENCH_INTERFACE": ""}).interface == "lo"


def test_horovod_variables_are_set_as_by_its_launcher():
    names = horovod_tf.variables(PLACE)
    assert (names["HOROVOD_RANK"], names["HOROVOD_SIZE"]) == ("1", "3")
    # One worker on each of three machines.
    assert (names["HOROVOD_LOCAL_RANK"], names["HOROVOD_LOCAL_SIZE"]) == ("0", "1")
    assert (names["HOROVOD_CROSS_RANK"], names["HOROVOD_CROSS_SIZE"]) == ("1", "3")
    address = names["HOROVOD_GLOO_RENDEZVOUS_ADDR"], names["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    assert address == ("10.0.0.1", "700")
    assert names["HOROVOD_GLOO_IFACE"] == "eth0"


def test_all_peers_start_from_equal_weights():
    shapes = [(784, 2048), (2048,), (3, 3, 64, 128), (128,)]
    weights = initial_weights(shapes, seed=1)
    assert [w.shape for w in weights] == shapes and {w.dtype for w in weights} == {np.dtype("f4")}
    assert not weights[1].any() and not weights[3].any()
    scales = initial_weights(shapes, seed=1, ones=[False, False, False, True])
    assert (scales[3] == 1).all() and not scales[1].any()
    for kernel, fans in ((weights[0], 784 + 2048), (weights[2], 9 * (64 + 128))):
        limit = math.sqrt(6 / fans)  # of the uniform distribution: its variance is limit^2 / 3
        assert np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(limit / math.sqrt(3), rel=0.01)
    again, other = initial_weights(shapes, seed=1), initial_weights(shapes, seed=2)
    np.testing.assert_array_equal(weights[2], again[2])
    assert not np.array_equal(weights[2], other[2])


@needs_root
def test_bytes_are_read_from_the_interface():
    code = "import socket\nfrom benchmarks.peers import common\n"
    code += "before = common.sent_bytes('eth0')\n"
    code += "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    code += "s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n"
    code += "s.sendto(bytes(1000), ('10.213.7.255', 9))\n"
    code += "print(before, common.sent_bytes('eth0'))"
    with netlab.network(1, "100mbit") as lab:
        done = subprocess.run(
            [*lab.wrappers[0], sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        expected = netlab.wire_bytes("eth0", lab.wrappers[0][-1])
    before, after = map(int, done.stdout.split())
    assert after == expected and before + 1000 < after < before + 1200
    assert common.sent_bytes("lo") is None


def run_fake(method, *flags):
    args = arguments(*flags)
    with netlab.network(2, "none") as lab:
        return runs.measure(Path(sys.executable), FAKE, args, lab, method)


def test_run_with_real_processes():
    measured = run_fake("none")
    assert len(measured["times_ms"]) == 3 and len(measured["warmup_ms"]) == 3
    assert measured["params"] == 7850 and measured["batch"] == 2
    assert measured["wire_bytes_per_step"] is None
    assert measured["versions"]["fake"] == "1.2"
    # No package of this environment is importable in the other library's.
    assert measured["settings"] == {"path": str(ROOT)}
    assert np.shape(measured["logits"]) == (4, 10)
    assert run_fake("dense")["logits"] != measured["logits"]


def test_failing_workers_are_reported():
    with pytest.raises(workers.MeasurementError, match="no such luck"):
        run_fake("crash")
    with pytest.raises(workers.MeasurementError, match="still running after 2 s"):
        run_fake("stuck", "--timeout", "2")
    with pytest.raises(report.DisagreementError, match="worker 1 has other weights"):
        run_fake("split")


# --------------------------------------------------------------------------------- environments


@pytest.fixture
def commands(monkeypatch):
    """Records install commands without running them; `venv` creates its files."""
    found = []

    def run(command, environment, log, timeout):
        found.append((command, environment))
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir(parents=True)
            (Path(command[3]) / "bin" / "python").touch()
            (Path(command[3]) / "pyvenv.cfg").touch()
        if "broken" in command:
            raise environments.InstallError("no such luck")

    monkeypatch.setattr(environments, "_run", run)
    return found


def peer(*installs, **more):
    return common.Peer(name="lib", module="m", methods=("none",), installs=installs, **more)


def test_environment_is_created_once(commands, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/foreign")
    wanted = peer(("lib==1", "numpy<2"), ("--no-cache-dir", "other"), environment={"A": "b"})
    python = environments.ensure(wanted, tmp_path, 5)
    assert python == tmp_path / "lib" / "bin" / "python"
    assert [c[:4] for c, _ in commands[:1]] == [
        [sys.executable, "-m", "venv", str(tmp_path / "lib")]
    ]
    assert [c[-2:] for c, _ in commands[1:]] == [["lib==1", "numpy<2"], ["--no-cache-dir", "other"]]
    for command, environment in commands[1:]:
        assert command[:3] == ["nice", "-n", "10"] and str(python) in command
        assert "PYTHONPATH" not in environment and environment["A"] == "b"
        assert environment["PATH"].split(":")[0] == str(tmp_path / "lib" / "bin")
    assert environments.ensure(wanted, tmp_path, 5) == python
    assert len(commands) == 3
    environments.ensure(peer(("lib==2",)), tmp_path, 5)  # another recipe
    assert len(commands) == 5 and commands[-1][0][-1] == "lib==2"


def test_broken_install_is_not_reused(commands, tmp_path):
    for _ in range(2):
        commands.clear()
        with pytest.raises(environments.InstallError, match="no such luck"):
            environments.ensure(peer(("broken",)), tmp_path, 5)
        assert len(commands) == 2


def test_foreign_folder_is_not_removed(commands, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "thesis.txt").touch()
    with pytest.raises(environments.InstallError, match="is no virtual environment"):
        environments.ensure(peer(), tmp_path, 5)
    assert (tmp_path / "lib" / "thesis.txt").exists() and commands == []


def test_requirements_of_an_install(commands, tmp_path):
    with pytest.raises(environments.InstallError, match=r"needs Python 2\.6 or 2\.5: this is 3\."):
        environments.ensure(peer(pythons=("2.6", "2.5")), tmp_path, 5)
    with pytest.raises(environments.InstallError, match="needs a thing"):
        environments.ensure(peer(tools={"no-such-tool": "a thing", "sh": "a shell"}), tmp_path, 5)
    assert commands == []


def test_python_interpreter(monkeypatch):
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert environments.interpreter(()) == environments.interpreter((own,)) == sys.executable
    which = {"python2.5": "/bin/python2.5"}.get
    monkeypatch.setattr(environments.shutil, "which", which)
    assert environments.interpreter(("2.6", "2.5")) == "/bin/python2.5"


def test_failed_install_shows_its_reason(tmp_path):
    log = tmp_path / "log"
    install = functools.partial(environments._run, environment=dict(os.environ), log=log)
    install(["sh", "-c", "echo fine"], timeout=5)
    assert log.read_text() == "fine\n"
    script = "echo first; echo ERROR: no wheel; echo last >&2; exit 3"
    with pytest.raises(environments.InstallError) as caught:
        install(["sh", "-c", script], timeout=5)
    assert report.reason(str(caught.value)) == f"ERROR: no wheel (log: {log})"
    assert "last" in str(caught.value)
    with pytest.raises(environments.InstallError, match=r"not done after 0.2 s \(--install_timeo"):
        install(["sleep", "60"], timeout=0.2)


# --------------------------------------------------------------------------------------- report


def test_workers_must_agree():
    same = [result(logits=(1.0, 2.0)), result(logits=(1.0, 2.00001))]
    other = [result(logits=(1.0, 2.0)), result(logits=(1.0, 2.1))]
    lost = [result(logits=(1.0, 2.0)), result(logits=(1.0, math.nan))]
    assert report.collect("fp16", same) is same[0]
    assert report.collect("none", other) is other[0]  # workers that train independently
    for results in (other, lost):
        with pytest.raises(report.DisagreementError, match="worker 1 has other .* after fp16"):
            report.collect("fp16", results)


def test_libraries_must_do_the_same_work():
    def library(none, dense, name="dense", **more):
        methods = {"none": result(logits=(none,)), name: result(logits=(dense,)), **more}
        return report.part({name: [r] for name, r in methods.items()}, {}, None)

    peers = {"a": library(1, 2), "b": library(1, 2.0001, fp16=result(logits=(9.0,)))}
    peers |= {"own": library(1, 2.0, name="Dense()")}
    assert report.differences(peers) == []
    peers |= {"c": library(1, 2.2), "own": library(1, 2.2, name="Dense()"), "d": {"error": "no"}}
    assert report.differences(peers) == [
        f"{name} and a did not do the same work: under `dense` their logits differ by 10.0% after "
        "the last step."
        for name in ("own", "c")
    ]


def test_table_and_versions():
    rounds = {
        "none": [result(times=(1.0, 2.0)), result(times=(3.0,), wire=2e6)],
        "dense": [result(times=(5.0,), wire=None)],
        "fp16": [],
    }
    part = report.part(rounds, {"fp16": "worker 1 failed\nmuch more"}, None)
    peers = {"lib": part, "away": {"error": "needs Python 2\nmuch more"}}
    lines = report.table(peers).splitlines()
    assert lines[1].split() == ["lib", "none", "2.0", "1.0", "7.0", "1.00", "3.000"]
    assert lines[2].split() == ["lib", "dense", "5.0", "5.0", "7.0", "2.50", "-"]
    assert lines[3].split(maxsplit=2) == ["lib", "fp16", "failed: worker 1 failed"]
    assert lines[4].split(maxsplit=1) == ["away", "not installed: needs Python 2"]
    assert report.versions(peers) == "lib: lib 3.1; none: rank=4; dense: rank=4"
    failures = report.failures(peers)
    assert len(failures) == 2 and all("much more" in text for text in failures)


def test_methods_alternate_and_a_failing_one_is_not_retried(monkeypatch, tmp_path, capsys):
    calls = []

    def measure(name, lab, method):
        calls.append((name, method))
        if method == "fp16":
            raise workers.MeasurementError("worker 0 failed")
        return result(times=(len(calls),), wire=None)

    ready = {
        name: runs.Library(methods, functools.partial(measure, name))
        for name, methods in {"a": ("none", "fp16"), "b": ("none",)}.items()
    }
    monkeypatch.setattr(runs, "libraries", lambda args: {**ready, "c": "no compiler"})
    flags = ["--rate", "none", "--rounds", "2", "--json", str(tmp_path / "report.json")]
    assert driver.main(flags) == 1
    assert calls == [("a", "none"), ("a", "fp16"), ("b", "none"), ("a", "none"), ("b", "none")]
    printed = capsys.readouterr()
    assert "c           not installed: no compiler" in printed.out
    assert "a, `fp16`: worker 0 failed" in printed.err and "no compiler" in printed.err
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["peers"]["a"]["methods"]["none"]["round_step_ms"] == [1, 4]
    assert list(written["peers"]["a"]["methods"]) == ["none", "fp16"]
    assert written["peers"]["c"] == {"error": "no compiler"} and len(written["problems"]) == 2
    monkeypatch.setattr(runs, "libraries", lambda args: {"b": ready["b"]})
    assert driver.main(["--rate", "none"]) == 0


def test_failed_install_is_one_line(monkeypatch, tmp_path):
    lacking = peer(pythons=("2.6",))
    monkeypatch.setattr(runs, "OTHERS", {"lib": lacking})
    args = arguments("--venvs", str(tmp_path))
    args.peers = ["tf_redsync", "lib"]
    chosen = runs.libraries(args)
    assert chosen["tf_redsync"].methods == (
        "none", "Dense()", "HalfPrecision()", "PowerSGD(rank=4)", "RedSync(momentum=0.9)",
        "CodedTopK()", "CodedGMC()",
    )  # fmt: skip
    assert set(chosen["tf_redsync"].versions) == {"tf_redsync", *mwms.versions()}
    assert chosen["lib"].startswith("needs Python 2.6")
