"""Recipes of examples/cluster for schedulers and containers, run under simulated schedulers.

Two machines are two network namespaces. The test sets variables, starts a process on each machine,
forwards a signal, and restarts the job, as a scheduler would.
"""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.chaos.network import Network, missing
from tests.recipes import indexed_job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 400  # takes half a minute, unless `again` is set
TRAIN = f"""
import os, time
import keras, numpy as np, tensorflow as tf
import tf_redsync as rs

keras.utils.set_random_seed(0)
strategy = rs.MultiWorkerMirroredStrategy(start_timeout=120)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
    model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.05), rs.RedSync()), "mse")
data = tf.data.Dataset.from_tensors((np.ones([4, 8], "f4"), np.ones([4, 4], "f4")))
options = tf.data.Options()
options.autotune.enabled = False
data = data.repeat({STEPS}).with_options(options)


def tell(batch, logs):
    print("step", int(model.optimizer.exchange.step.numpy()), flush=True)
    time.sleep(0 if os.path.exists("again") else 0.06)


calls = [rs.callbacks.Checkpoint("run", every=10**6), keras.callbacks.LambdaCallback(
    on_train_batch_end=tell)]
model.fit(data, epochs=1, verbose=0, callbacks=calls)
"""
# A training without TensorFlow; each worker writes its own "checkpoint".
LIGHT = f"""
import json, os, signal, sys, time

config = json.loads(os.environ["TF_CONFIG"])
index, addresses = config["task"]["index"], config["cluster"]["worker"]
assert len(addresses) == 2 and config["task"]["type"] == "worker"
name, stop = f"light-{{index}}", []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: stop.append(1))
begin = int(open(name).read()) if os.path.exists(name) else 0
for step in range(begin + 1, {STEPS} + 1):
    print("step", step, flush=True)
    time.sleep(0 if os.path.exists("again") else 0.1)
    if step == 10 and not begin:
        while not (stop or os.path.exists("asked")):
            time.sleep(0.01)
        open("asked", "w").close()  # one worker's request is enough
        open(name, "w").write("10")
        sys.exit(75)
"""
SECRET = {"TF_REDSYNC_JOB": "a secret of the test"}
SCONTROL = """#!/bin/sh
case $1 in
show) printf '%s\\n' $ADDRESSES ;;
requeue) echo "$2" > requeued ;;
esac
"""
TF_REDSYNC = f"""#!/bin/sh
exec {sys.executable} -m tf_redsync "$@"
"""
SRUN = """#!/bin/bash
echo $$ > srun.pid
export SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
while [[ $1 == --* ]]; do shift; done
trap 'kill -USR1 "${pids[@]}"' USR1
rank=0
for name in $NAMESPACES; do
  SLURM_NODEID=$rank SLURM_STEP_ID=0 ip netns exec "$name" "$@" > "task-$rank" 2>&1 &
  pids+=($!)
  rank=$((rank + 1))
done
highest=0
for pid in "${pids[@]}"; do
  while :; do wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null || break; done
  [ "$code" -gt "$highest" ] && highest=$code
done
exit "$highest"
"""


def recipe(name):
    """A file of examples/cluster."""
    return (ROOT / "examples" / "cluster" / name).read_text()


class Slurm:
    """A SLURM job of a batch script."""

    machines = 2
    recipe = "slurm.sbatch"

    def __init__(self, folder, network):
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "tf-redsync": TF_REDSYNC}.items():
            (tools / name).write_text(text)
            (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
        (folder / "job.sh").write_text(recipe(self.recipe))
        subprocess.run(["bash", "-n", "job.sh"], cwd=folder, check=True)
        self._env = {
            **environment(),
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ADDRESSES": " ".join(address.rpartition(":")[0] for address in network.addresses),
            "NAMESPACES": " ".join(network.namespaces),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "2",
        }

    def start(self):
        self._process = subprocess.Popen(
            ["bash", "job.sh"], cwd=self.folder, env=self._env, start_new_session=True
        )

    def stop(self):
        """Sends the signal of an approaching time limit."""
        os.kill(int((self.folder / "srun.pid").read_text()), signal.SIGUSR1)

    def codes(self):
        return [self._process.wait(300)]

    def check_stopped(self):
        assert (self.folder / "requeued").read_text() == "4711\n"

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ElasticSlurm(Slurm):
    """A SLURM job that may lose nodes; in these tests it loses none."""

    recipe = "slurm-elastic.sbatch"


class Containers:
    """Processes with a host name each, in their own namespaces."""

    machines = 2

    def __init__(self, folder, network):
        self.folder = folder
        self._namespaces = network.namespaces
        hosts = ["127.0.0.1 localhost"]
        for address, names in zip(network.addresses, self._names(), strict=True):
            hosts.append(f"{address.rpartition(':')[0]} {names}")
        for namespace in network.namespaces:  # `ip netns exec` mounts it over /etc/hosts
            place = Path("/etc/netns") / namespace
            place.mkdir(parents=True, exist_ok=True)
            (place / "hosts").write_text("\n".join(hosts) + "\n")
        self._started = []

    def start(self):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for index, namespace in enumerate(self._namespaces[:2]):
            (_, *words), env = self._command(index)  # the command is a Python script
            words = [sys.executable, "-m", "tf_redsync", *words]
            with (self.folder / f"task-{index}").open("w") as log:
                self._started.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", namespace, *words],
                        cwd=self.folder, env={**environment(), "PATH": path, **env},
                        stdout=log, stderr=log,
                    )
                )  # fmt: skip

    def stop(self):
        """Asks one of them to end."""
        self._started[-1].send_signal(signal.SIGTERM)

    def codes(self):
        return [process.wait(self._grace) for process in self._started[-2:]]

    def check_stopped(self):
        pass

    def close(self):
        for process in self._started:
            process.kill()
        for namespace in self._namespaces:
            place = Path("/etc/netns") / namespace
            (place / "hosts").unlink()
            place.rmdir()


class Kubernetes(Containers):
    """The pods of a Job."""

    recipe = "kubernetes.yaml"

    def __init__(self, folder, network):
        job, self._host, self._subdomain = indexed_job(self.recipe)
        self._pod = job["spec"]["template"]["spec"]
        self._grace = self._pod["terminationGracePeriodSeconds"]
        super().__init__(folder, network)

    def _names(self):
        hosts = [self._host.format(index) for index in range(2)]
        return [f"{host}.{self._subdomain} {host}" for host in hosts]

    def _command(self, index):
        env = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": self._host.format(index)}
        return self._pod["containers"][0]["command"], env


class ElasticKubernetes(Containers):
    """Two pods of a Job, and the pod of their rendezvous, which outlives them."""

    machines = 3

    def __init__(self, folder, network):
        parts = [part["spec"] for part in yaml.safe_load_all(recipe("kubernetes-elastic.yaml"))]
        server, self._pod = (part["template"]["spec"] for part in parts if "template" in part)
        self._grace = self._pod["terminationGracePeriodSeconds"]
        super().__init__(folder, network)
        _, *words = server["containers"][0]["command"]
        command = ["ip", "netns", "exec", network.namespaces[2], sys.executable, "-m", "tf_redsync"]
        self._rendezvous = subprocess.Popen([*command, *words], env={**environment(), **SECRET})

    def _names(self):
        return ["train-a", "train-b", "train-rendezvous"]

    def _command(self, index):
        command = list(self._pod["containers"][0]["command"])
        command[command.index("2:4")] = "2:2"  # no wait for more pods
        return command, SECRET

    def stop(self):
        """Asks all pods to end."""
        for process in self._started[-2:]:
            process.send_signal(signal.SIGTERM)

    def check_stopped(self):
        assert self._rendezvous.poll() is None

    def codes(self):
        found = super().codes()
        if not any(found):  # the rendezvous ends with the job
            found.append(self._rendezvous.wait(60))
        return found

    def close(self):
        self._rendezvous.kill()
        super().close()


class JobSet(Kubernetes):
    """The pods of a JobSet's Job."""

    recipe = "jobset.yaml"


class TrainJob(Kubernetes):
    """Pods of the JobSet that Kubeflow Trainer creates from a TrainJob."""

    recipe = "trainjob.yaml"


class Compose(Containers):
    """Containers of compose's services, with another script instead of the example."""

    def __init__(self, folder, network):
        self._services = yaml.safe_load(recipe("compose.yaml"))["services"]
        first = self._services["worker-0"]
        self._grace = int(first["stop_grace_period"].rstrip("s"))
        (folder / "mnist.py").write_text((folder / "train.py").read_text())
        super().__init__(folder, network)

    def _names(self):
        return list(self._services)

    def _command(self, index):
        service = self._services[f"worker-{index}"]
        return service["command"], {**service["environment"], **SECRET}


def environment():
    return {
        **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def steps(folder, rank):
    text = (folder / f"task-{rank}").read_text()
    return [int(step) for step in re.findall(r"step (\d+)", text)]


@pytest.mark.parametrize("name", [Slurm.recipe, ElasticSlurm.recipe])
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, False), (1, 0, False), (75, 9, True), (138, "", True), (138, 2, True), (138, 3, False)],
)
def test_slurm_job_is_requeued_after_the_signal(name, code, restarts, requeued, tmp_path):
    """Before and after `fit` the signal ends the workers: 138."""
    for tool, text in {"scontrol": SCONTROL, "srun": f"#!/bin/sh\nexit {code}\n"}.items():
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "job.sh").write_text(recipe(name))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    env |= {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "ADDRESSES": "node1"}
    env |= {"SLURM_RESTART_COUNT": str(restarts)}
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, check=False).returncode == code
    assert (tmp_path / "requeued").exists() == requeued


deep = pytest.mark.deep


@pytest.mark.parametrize(
    ("scheduler", "script"),
    [
        (Slurm, LIGHT),
        (Kubernetes, LIGHT),
        (TrainJob, LIGHT),
        (ElasticSlurm, LIGHT),
        (ElasticKubernetes, LIGHT),
        pytest.param(JobSet, LIGHT, marks=deep),
        pytest.param(Compose, LIGHT, marks=deep),
        pytest.param(Slurm, TRAIN, marks=deep),
        pytest.param(Kubernetes, TRAIN, marks=deep),
        pytest.param(TrainJob, TRAIN, marks=deep),
        pytest.param(JobSet, TRAIN, marks=deep),
        pytest.param(Compose, TRAIN, marks=deep),
        pytest.param(ElasticSlurm, TRAIN, marks=deep),
    ],
    ids=lambda part: (
        part.__name__ if isinstance(part, type) else ["training", "light"][part == LIGHT]
    ),
)
def test_stopped_job_resumes_after_restart(scheduler, script, tmp_path):
    if missing():
        pytest.skip(missing())
    (tmp_path / "train.py").write_text(script)
    with Network(scheduler.machines) as network:
        job = scheduler(tmp_path, network)
        try:
            job.start()
            limit = time.monotonic() + 200
            for rank in range(2):
                while not (tmp_path / f"task-{rank}").exists() or len(steps(tmp_path, rank)) < 5:
                    assert time.monotonic() < limit, f"task {rank}"
                    time.sleep(0.2)
            job.stop()
            assert set(job.codes()) == {75}, (tmp_path / "task-1").read_text()
            job.check_stopped()
            ends = [steps(tmp_path, rank)[-1] for rank in range(2)]
            assert ends[0] == ends[1] < STEPS

            (tmp_path / "again").touch()
            job.start()
            assert set(job.codes()) == {0}, (tmp_path / "task-1").read_text()
            for rank in range(2):
                found = steps(tmp_path, rank)
                assert found[0] == ends[0] + 1 and found[-1] == STEPS
        finally:
            job.close()
