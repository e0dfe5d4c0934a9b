"""Who reaches TensorFlow's servers of workers that the launcher has started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    strategy.reduce("SUM", tf.constant(1.0), axis=None)  # nobody ends before the others have looked
print("total", total)
"""


@pytest.mark.parametrize(
    ("choice", "elsewhere"),
    [
        ("auto", "closed"),
        pytest.param("no", "open", marks=pytest.mark.deep),
        pytest.param("yes", "open", marks=pytest.mark.deep),  # in a network without anybody else
    ],
)
def test_servers_are_reached_from(tmp_path, choice, elsewhere):
    from tf_redsync.cli import isolation

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
