"""The installed wheel trains on two workers with native ops; `--deep` tests more versions."""

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check_install():
    spec = importlib.util.spec_from_file_location("check_install", ROOT / "tools/check_install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interpreter_without_setuptools_builds_in_an_environment(
    check_install, monkeypatch, tmp_path
):
    """Such as every one of actions/setup-python: none from 3.12 on, and an old one before."""
    assert check_install.builder(tmp_path) == sys.executable
    venv.create(tmp_path / "bare")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.setattr(check_install, "run", lambda command: venv.create(command[-1]))
    asked = []
    monkeypatch.setattr(check_install, "pip", lambda python, *words: asked.append((python, words)))
    python = check_install.builder(tmp_path)
    assert python.is_file() and python.is_relative_to(tmp_path / "builder")
    ((installer, (wanted,)),) = asked
    assert installer == python and wanted.startswith("setuptools>=")


def check(*arguments, limit):
    command = [sys.executable, "tools/check_install.py", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert "all as it should be" in run.stdout


def test_wheel_with_installed_tensorflow():
    check("--this", limit=280)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_wheel_and_sdist_with_old_and_new_tensorflow():
    check(limit=3500)
