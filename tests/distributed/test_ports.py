"""The preloaded library closes the ports of workers' TensorFlow servers to other machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.cluster import run_workers
from tests.processes import skip_without_namespaces
from tf_redsync.cli import isolation

ROOT = Path(__file__).resolve().parents[2]
# 127.0.0.2 is an address of this machine that TF_CONFIG does not contain: a server that listens on
# all interfaces is reachable there too.
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


def reachable_addresses():
    """Addresses at which the servers of both workers accept connections; threads of this one."""
    import socket
    import threading

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
    strategy.reduce("SUM", tf.constant(1.0), axis=None)  # keeps all servers running until then
    threads = [thread.name for thread in threading.enumerate()]
    return {"found": json.dumps(found), "threads": json.dumps(threads)}


@pytest.mark.skipif(
    not isolation.loopback_only()[0], reason=f"{isolation.LIBRARY.name} is not built"
)
def test_preloaded_library_binds_servers_to_own_address():
    for worker in run_workers(reachable_addresses, env=isolation.loopback_only()[0]):
        assert json.loads(worker["found"]) == ["127.0.0.1"] * 2
        assert "tf_redsync_connections" in worker["threads"]  # of `tcp_timeout.keep`


@pytest.mark.deep  # via the launcher; tests/unit/test_isolation.py tests it without TensorFlow
@pytest.mark.parametrize(
    ("choice", "elsewhere"),
    # The last one runs in a network namespace without other hosts.
    [("auto", "closed"), ("no", "open"), ("yes", "open")],
)
def test_isolate_option_of_launcher(tmp_path, choice, elsewhere):
    if choice == "auto" and not isolation.loopback_only()[0]:
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
        skip_without_namespaces()
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = (tmp_path / f"worker_{rank}.log").read_text().splitlines()
        found = [line for line in lines if line.startswith(("127.", "total"))]
        assert found == ["127.0.0.1 open", f"127.0.0.2 {elsewhere}"] * 2 + ["total 2.0"]
