"""The recipes of examples/cluster: what can be started here is, the rest is held against schemas.

SLURM's and Kubernetes's are played in tests/distributed/test_schedulers.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.unit.test_clusters import FAKE
from tf_redsync.cli import launch
from tf_redsync.cli.command_line import Parser

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
TRAIN = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
print("worker", config["task"]["index"], "of", len(config["cluster"]["worker"]), sys.argv[1:])
"""


def start(script, folder, **env):
    """Starts a script of examples/cluster for a training in `folder`."""
    (folder / "train.py").write_text(TRAIN)
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    if not (tools / "python").exists():
        (tools / "python").symlink_to(sys.executable)
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [CLUSTER / script, "train.py", "--epochs=3"],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_worker_is_started_by_hand_on_each_machine(tmp_path):
    addresses = "10.0.0.1:12345 10.0.0.2:12345"
    jobs = [start("tf_config.sh", tmp_path, WORKERS=addresses, INDEX=str(i)) for i in range(2)]
    for index, job in enumerate(jobs):
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 0 and f"worker {index} of 2 ['--epochs=3']" in out, out
    job = start("tf_config.sh", tmp_path, WORKERS=addresses, INDEX="")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and "the number of the worker on this machine" in out


def test_workers_are_started_over_ssh(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE)
    ssh.chmod(0o755)
    job = start("ssh.sh", tmp_path, HOSTS="localhost:2", FLAGS=f"--ssh {ssh}")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out
    assert all(f"worker {index} of 2 ['--epochs=3']" in out for index in range(2)), out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_job_is_one_of_kubernetes():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    for part in (service, job):
        kubernetes_validate.validate(part, "1.31", strict=True)
    template = job["spec"]["template"]["spec"]
    args = parsed(template["containers"][0]["command"])
    assert args.kubernetes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert template["subdomain"] == service["metadata"]["name"]
    assert args.stop_grace < template["terminationGracePeriodSeconds"]
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_the_services_of_compose_are_the_workers():
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    for index, (name, service) in enumerate(services.items()):
        config = json.loads(service["environment"]["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": index}
        assert [a.partition(":")[0] for a in config["cluster"]["worker"]] == list(services)
        args = parsed(service["command"])
        assert (ROOT / "examples" / args.script[0]).is_file() and name == f"worker-{index}"
        assert args.stop_grace < int(service["stop_grace_period"].rstrip("s"))
        dockerfile = ROOT / service["build"]["dockerfile"]
        assert dockerfile.is_file() and "tf-redsync build" in dockerfile.read_text()


def parsed(command):
    """What the launcher makes of a container's command."""
    assert command[:2] == ["tf-redsync", "launch"]
    parser = Parser()
    launch.COMMAND.configure(parser)
    return parser.parse_args(command[2:])


def test_the_page_leads_to_these_recipes():
    page = (ROOT / "docs" / "launching.md").read_text()
    for name in ("slurm.sbatch", "kubernetes.yaml"):
        assert f"](../examples/cluster/{name})" in page
