"""Who reaches TensorFlow's servers of workers: what is preloaded closes their ports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.cluster import run_workers
from tf_redsync.cli import isolation

ROOT = Path(__file__).resolve().parents[2]
# 127.0.0.2 is an address of this machine that is not the one in TF_CONFIG: whoever listens on all
# interfaces is reached there as well.
SCRIPT = """
import json, os, socket
import tensorflow as tf
import tf_redsync as rs
strategy = rs.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = strategy.reduce("SUM", tf.constant(1.0), axis=None).numpy()
for address in json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]:
    port = int(address.rpartition(":")[2])
    for host in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as client:
            print(host, "open" if client.connect_ex((host, port)) == 0 else "closed")
with strategy.scope():
    strategy.reduce("SUM", tf.constant(1.0), axis=None)  # keeps all servers up until then
print("total", total)
"""


def reached():
    """The addresses at which the server of either worker answers."""
    import socket

    import tensorflow as tf

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    strategy.reduce("SUM", tf.constant(1.0), axis=None)
    found = []
    for address in json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]:
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as client:
                if client.connect_ex((host, int(address.rpartition(":")[2]))) == 0:
                    found.append(host)
    strategy.reduce("SUM", tf.constant(1.0), axis=None)  # keeps all servers up until then
    return {"found": json.dumps(found)}


@pytest.mark.skipif(not isolation.loopback_only(), reason=f"{isolation.LIBRARY.name} is not built")
def test_with_the_library_servers_are_reached_from_this_address_only():
    for worker in run_workers(reached, env=isolation.loopback_only()):
        assert json.loads(worker["found"]) == ["127.0.0.1"] * 2


@pytest.mark.deep  # of the launcher: tests/unit/test_isolation.py, without TensorFlow
@pytest.mark.parametrize(
    ("choice", "elsewhere"),
    # The last one is in a network without anybody else.
    [("auto", "closed"), ("no", "open"), ("yes", "open")],
)
def test_servers_are_reached_from(tmp_path, choice, elsewhere):
    if choice == "auto" and not isolation.loopback_only():
        pytest.skip(f"{isolation.LIBRARY.name} is not built")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "tf_redsync.launch", "-n", "2", "--timeout", "120"]
    done = subprocess.run(
        [*command, "--isolate", choice, "--log_dir", str(tmp_path), str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    if choice == "yes" and "isolate='yes'" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = (tmp_path / f"worker_{rank}.log").read_text().splitlines()
        found = [line for line in lines if line.startswith(("127.", "total"))]
        assert found == ["127.0.0.1 open", f"127.0.0.2 {elsewhere}"] * 2 + ["total 2.0"]
