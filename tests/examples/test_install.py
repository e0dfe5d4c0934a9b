"""The wheel in an environment of its own trains on two workers, natively; all of it: --deep."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(*arguments, limit):
    command = [sys.executable, "tools/check_install.py", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert "all as it should be" in run.stdout


def test_the_wheel_beside_this_tensorflow():
    check("--this", limit=280)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_wheel_and_sdist_beside_old_and_new_tensorflows():
    check(limit=3500)
