"""Recipes of examples/cluster: runs those that can run here, checks the others against schemas.

tests/distributed/test_schedulers.py simulates SLURM, Kubernetes and compose. Ray's recipe runs
where Ray is installed.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.recipes import CLUSTER, documents, indexed_job
from tests.unit.test_clusters import FAKE
from tf_redsync.cli import launch, node_rendezvous
from tf_redsync.cli.command_line import Parser

ROOT = Path(__file__).resolve().parents[2]
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
        start_new_session=True,
    )  # fmt: skip


def finish(job):
    """Waits for a script and returns its output; after a minute, SIGKILL ends all its processes."""
    try:
        return job.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise


def test_manual_start_on_each_machine(tmp_path):
    addresses = "10.0.0.1:12345 10.0.0.2:12345"
    jobs = [start("tf_config.sh", tmp_path, WORKERS=addresses, INDEX=str(i)) for i in range(2)]
    for index, job in enumerate(jobs):
        out = finish(job)
        assert job.returncode == 0 and f"worker {index} of 2 ['--epochs=3']" in out, out
    job = start("tf_config.sh", tmp_path, WORKERS=addresses, INDEX="")
    out = finish(job)
    assert job.returncode == 1 and "the number of the worker on this machine" in out


def test_start_over_ssh(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE)
    ssh.chmod(0o755)
    job = start("ssh.sh", tmp_path, HOSTS="localhost:2", FLAGS=f'--ssh "{ssh} -4 -p2222"')
    out = finish(job)
    assert job.returncode == 0, out
    assert all(f"worker {index} of 2 ['--epochs=3']" in out for index in range(2)), out


RECIPES = ("kubernetes.yaml", "jobset.yaml", "trainjob.yaml")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_pods_match_indexed_job(name):
    job, _, subdomain = indexed_job(name)
    kubernetes_validate.validate(job, "1.31", strict=True)
    spec, template = job["spec"], job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    args = parsed(container["command"])
    assert args.kubernetes == spec["completions"] == spec["parallelism"] == 2
    assert spec["completionMode"] == "Indexed" and subdomain
    assert args.stop_grace < template["terminationGracePeriodSeconds"]
    policies = spec["podFailurePolicy"]["rules"]
    names = {rule["onExitCodes"]["containerName"] for rule in policies if "onExitCodes" in rule}
    assert names == {container.pop("name")}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kubernetes_service_selects_pods():
    service = documents("kubernetes.yaml")["Service"]
    kubernetes_validate.validate(service, "1.31", strict=True)
    job, _, subdomain = indexed_job("kubernetes.yaml")
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pods_of_elastic_job_use_its_rendezvous():
    parts = list(yaml.safe_load_all((CLUSTER / "kubernetes-elastic.yaml").read_text()))
    for part in parts:
        kubernetes_validate.validate(part, "1.31", strict=True)
    service, server, job = parts
    assert service["spec"]["selector"] == {"job-name": server["metadata"]["name"]}
    (serves,) = server["spec"]["template"]["spec"]["containers"]
    assert serves["command"][:2] == ["tf-redsync", "rendezvous"]
    parser = Parser()
    node_rendezvous.COMMAND.configure(parser)
    port = parser.parse_args(serves["command"][2:]).port
    assert service["spec"]["ports"] == [{"port": port}]
    template = job["spec"]["template"]["spec"]
    (worker,) = template["containers"]
    args = parsed(worker["command"])
    assert args.rendezvous == f"{service['metadata']['name']}:{port}"
    assert args.nodes == f"2:{job['spec']['parallelism']}" and "completions" not in job["spec"]
    assert args.stop_grace < template["terminationGracePeriodSeconds"]
    assert worker["env"] == serves["env"]


@pytest.mark.parametrize("name", RECIPES[1:])
def test_custom_resources_match_definitions(name):
    definitions = json.loads(Path(__file__).with_name("custom_resources.json").read_text())
    for kind, resource in documents(name).items():
        assert resource["apiVersion"] == definitions[kind]["apiVersion"]
        validator = jsonschema.Draft202012Validator(definitions[kind]["schema"])
        validator.validate(resource)
        resource["spec"]["replicas"] = 2  # unknown to their schema
        assert not validator.is_valid(resource)


def test_compose_services_are_workers():
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
    """The launcher's arguments parsed from a container's command."""
    assert command[:2] == ["tf-redsync", "launch"]
    parser = Parser()
    launch.COMMAND.configure(parser)
    return parser.parse_args(command[2:])


def test_pages_link_recipes():
    page = (ROOT / "docs" / "launching.md").read_text()
    for name in ("slurm.sbatch", *RECIPES):
        assert f"](../examples/cluster/{name})" in page
    page = (ROOT / "docs" / "elastic.md").read_text()
    for name in ("slurm-elastic.sbatch", "kubernetes-elastic.yaml"):
        assert f"](../examples/cluster/{name})" in page
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"](cluster/{path.name})" in page for path in CLUSTER.iterdir() if path.is_file())
