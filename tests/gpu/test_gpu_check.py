"""`tools/gpu_check.sh` without a GPU: the steps that run in the emulator."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu import device as d
from tests.gpu.test_emulator import needs_compiler


def checked(out, *words, **env):
    command = ["bash", str(d.ROOT / "tools" / "gpu_check.sh"), *words]
    variables = {**os.environ, "OUT": str(out), "CUDA_VISIBLE_DEVICES": "-1"}
    variables |= {"PYTHON": sys.executable, **env}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


@pytest.mark.deep
@needs_compiler
def test_steps_that_need_no_gpu(tmp_path):
    run = checked(tmp_path, "--emulate")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    states = {name: result["state"] for name, result in found.items()}
    passed = {name for name, state in states.items() if state == "passed"}
    assert passed == {"build", "tests", "repetitions"}
    assert {states[name] for name in set(states) - passed} == {"left out"}
    assert "passed" in found["tests"]["text"]
    assert found["repetitions"]["text"] == "2^14: 5 equal, 2^16: 20 equal"
    table = (tmp_path / "gpu_check.md").read_text()
    assert "| tests | passed |" in table and table.count("\n") == len(found) + 2
    assert not list(tmp_path.glob("*.so"))


@needs_compiler
def test_failed_build_is_reported(tmp_path):
    """Without a working compiler the build fails, and dependent steps are skipped."""
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    run = checked(tmp_path / "out", "--emulate", CXX=str(broken))
    assert run.returncode == 1
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert found["build"]["state"] == "failed"
    assert found["repetitions"] == {**found["repetitions"], "state": "left out",
                                    "text": "nothing is built"}  # fmt: skip


def test_missing_gpu_is_reported(tmp_path):
    if d.cuda_problem() is None:
        pytest.skip("there is a GPU")
    run = checked(tmp_path)
    assert run.returncode == 1
    assert "there is nothing to check: " in run.stderr and "--emulate" in run.stderr
