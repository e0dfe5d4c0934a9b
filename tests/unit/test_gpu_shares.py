"""GPUs of a machine divided among its workers by CUDA_VISIBLE_DEVICES, without a GPU."""

import os
import sys
from pathlib import Path

import pytest

from tf_redsync.cli import gpus, launch, restarts, ssh
from tf_redsync.cli.output import Output
from tf_redsync.cli.processes import Job, TimeLimits
from tf_redsync.cli.restarts import Restarts

ROOT = Path(__file__).resolve().parents[2]
NAME = "CUDA_VISIBLE_DEVICES"
SHOW = "import os\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)\n"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function that installs an `nvidia-smi` with this output and exit code."""
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(count=0, text="", code=0):
        lines = [f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(count)]
        lines[1:1] = ["  MIG 1g.18gb Device 0: (UUID: MIG-0)"] if count else []
        said = "\n".join([*lines, text])
        path = tmp_path / "nvidia-smi"
        path.write_text(
            f"#!/bin/sh\n[ \"$*\" = -L ] || exit 9\ncat <<'END'\n{said}\nEND\nexit {code}"
        )
        path.chmod(0o755)

    return install


@pytest.mark.parametrize(
    ("listed", "workers", "shares"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("0,1,2,3,4", 2, ["0,1", "2,3"]),
        ("3,5", 2, ["3", "5"]),
        ("GPU-8932f937-d72c,MIG-1a", 2, ["GPU-8932f937-d72c", "MIG-1a"]),
        ("0", 2, ["0", "0"]),
        ("7,6", 5, ["7", "6", "7", "6", "7"]),
        (" 1 , 2 ", 2, ["1", "2"]),
        ("3,5,-1,7", 2, ["3", "5"]),  # CUDA ignores the entries after an invalid one
    ],
)
def test_each_worker_gets_its_share_of_an_inherited_list(listed, workers, shares):
    own = gpus.worker_variables({NAME: listed}, [{}] * workers)
    assert own == [{NAME: share} for share in shares]


@pytest.mark.parametrize("listed", ["", "-1", "NoDevFiles", "-1,0"])
def test_hidden_gpus_stay_hidden(listed, capsys):
    assert gpus.worker_variables({NAME: listed}, [{}] * 2) == [{}, {}]
    assert capsys.readouterr().err == ""


def test_one_worker_keeps_all_gpus(capsys):
    assert gpus.worker_variables({NAME: "3,5"}, [{}]) == [{}]
    assert capsys.readouterr().err == ""


def test_entry_of_a_worker_wins(capsys):
    own = gpus.worker_variables({NAME: "3,5"}, [{NAME: "0,1"}, {"A": "a"}])
    assert own == [{NAME: "0,1"}, {NAME: "5", "A": "a"}]
    capsys.readouterr()
    chosen = [{NAME: "1"}, {NAME: "1"}]
    assert gpus.worker_variables({NAME: "3,5"}, chosen) == chosen
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("listed", "workers", "words"),
    [
        ("0", 2, ["2 workers share 1 GPU ", "TF_FORCE_GPU_ALLOW_GROWTH=true", "at most 1 worker "]),
        ("0,1", 4, ["4 workers share 2 GPUs ", "at most 2 workers "]),
        ("0,1", 2, ["each of 2 workers gets 1 of 2 GPUs"]),
        ("0,1,2,3", 2, ["each of 2 workers gets 2 of 4 GPUs", "start 4 here"]),
        ("0,1,2", 2, ["each of 2 workers gets 1 of 3 GPUs", "1 GPU is idle"]),
    ],
)
def test_division_is_reported_in_one_line(listed, workers, words, capsys):
    gpus.worker_variables({NAME: listed}, [{}] * workers)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words), err
    assert ("idle" in err) == (listed == "0,1,2")


def test_advice_that_is_followed_is_not_repeated(capsys):
    gpus.worker_variables({NAME: "0", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}, [{}] * 2)
    err = capsys.readouterr().err
    assert "2 workers share 1 GPU " in err and "ALLOW_GROWTH" not in err


def test_gpus_of_the_machine_are_counted_without_cuda(machine, monkeypatch, capsys):
    machine(4)
    assert gpus.worker_variables({}, [{}] * 4) == [{NAME: str(i)} for i in range(4)]
    capsys.readouterr()
    monkeypatch.setattr(gpus, "device_files", lambda: [])
    machine(0, "No devices were found", 6)
    assert gpus.worker_variables({}, [{}] * 2) == [{}, {}]
    assert capsys.readouterr().err == ""


def test_uncountable_gpus_are_reported(machine, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "device_files", lambda: [Path("/dev/nvidia0")])
    machine(1, "Unable to determine the device handle: GPU is lost", 15)
    assert gpus.worker_variables({}, [{}] * 2) == [{}, {}]
    err = capsys.readouterr().err
    assert "GPU is lost" in err and NAME in err
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert gpus.worker_variables({}, [{}] * 2) == [{}, {}]
    assert "nvidia-smi" in capsys.readouterr().err


# ---------------------------------------------------------------------------- real launches


def script(tmp_path, body=SHOW):
    (tmp_path / "train.py").write_text(body)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("inherited", [True, False])
def test_launched_workers_see_different_gpus(tmp_path, monkeypatch, machine, inherited):
    machine(2)
    if inherited:
        monkeypatch.setenv(NAME, "3,5")
    result = launch.run([sys.executable, script(tmp_path)], 2, timeout=20)
    assert [w.output for w in result.workers] == (["3", "5"] if inherited else ["0", "1"])


def test_environment_of_the_job_is_divided(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, "-1")
    command = [sys.executable, script(tmp_path)]
    result = launch.run(command, 2, timeout=20, env={NAME: "3,5"}, worker_env=[{}, {NAME: "9"}])
    assert [w.output for w in result.workers] == ["3", "9"]


def test_restart_without_a_worker_keeps_the_assignment(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "PAUSES", ())
    monkeypatch.setenv(NAME, "3,5,7")
    body = f"{SHOW}import sys, time\n"
    body += "if os.environ['CUDA_VISIBLE_DEVICES'] == '5': sys.exit(1)\n"
    body += "time.sleep(0.5 if int(os.environ['TF_REDSYNC_RESTART']) < 2 else 0)"
    limits = {"timeout": 50, "grace": 1, "max_restarts": 2, "min_workers": 2}
    result = launch.run([sys.executable, script(tmp_path, body)], 3, **limits)
    assert result.restarts == 2 and result.exit_code == 0, result.message
    assert [w.output for w in result.workers] == ["3", "7"]


def test_spares_see_the_gpus_of_their_workers(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, "3,5")
    spares = {}

    def add(self, place, words, env, cores):
        spares[place] = env[NAME]

    def attempts(make, start, restarts):
        start.prepare()
        return launch.LaunchResult((), 0, "")

    monkeypatch.setattr(launch.Spares, "add", add)
    monkeypatch.setattr(launch, "run_attempts", attempts)
    launch.run([sys.executable, script(tmp_path)], 2, max_restarts=1)
    assert spares == {0: "3", 1: "5"}


def test_workers_of_a_slurm_node_divide_its_gpus(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(NAME, "3,5")
    for name, value in {"JOB_ID": "1", "NODEID": "1", "STEP_NODELIST": "a,b"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(launch.options.schedulers.shutil, "which", lambda name: None)
    logs = tmp_path / "logs"
    flags = ["--slurm", "-n", "2", "--log-dir", str(logs)]
    assert launch.main([*flags, script(tmp_path)]) == 0
    assert [(logs / f"worker_{rank}.log").read_text() for rank in (2, 3)] == ["3\n", "5\n"]
    assert "each of 2 workers gets 1 of 2 GPUs" in capfd.readouterr().err


def test_workers_of_an_elastic_node_divide_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, "3,5")
    monkeypatch.setenv("TF_REDSYNC_JOB", "secret")
    started = []

    class Agent:
        def __init__(self, nodes, limits, signals, start, prepare):
            started.extend(start(["{}", "{}"], number) for number in range(2))

        def run(self):
            return 0

    monkeypatch.setattr(launch, "NodeAgent", Agent)
    flags = ["--nodes", "1", "--rendezvous", "127.0.0.1:1", "--workers-per-node", "2"]
    assert launch.main([*flags, script(tmp_path)]) == 0
    assert [start.worker_env for start in started] == [[{NAME: "3"}, {NAME: "5"}]] * 2


@pytest.mark.parametrize("remaining", [[0, 1, 2], [0, 2]])
def test_agents_over_ssh_divide_the_gpus_of_their_machine(tmp_path, monkeypatch, remaining):
    """Places 1 and 2 are on one machine; place 2 keeps its GPU if 1 is dropped."""
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    fake.chmod(0o755)
    path = script(tmp_path)
    hosts = [ssh.Host("a", 1), ssh.Host("b", 2)]
    remote = ssh.Remote(hosts, str(fake), sys.executable, None, {NAME: "3,5"})
    rule = Restarts(0, 2, remaining)
    start = ssh.SSHStart([path], remote, 1, None, Output(None, False, False), rule)
    job = Job(TimeLimits(30, 1, 1), False, [])
    try:
        start(job)
        result = job.supervise()
    finally:
        job.close()
    shown = [worker.output.splitlines()[-1] for worker in result.workers]
    assert shown == [{0: "3,5", 1: "3", 2: "5"}[place] for place in remaining]
    notices = ["each of 2 workers" in worker.output for worker in result.workers]
    assert notices == [place == 1 for place in remaining]
