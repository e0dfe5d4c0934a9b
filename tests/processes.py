"""Helpers for processes that tests start."""

import subprocess

import pytest

# Code before the first import of tf_redsync in a process that needs no TensorFlow, whose import
# takes seconds: the process looks like the command `tf-redsync`.
AS_COMMAND = "import sys; sys.orig_argv = ['python', '-m', 'tf_redsync']\n"


def alive(pid):
    """Whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process ended before or during the read
        return False


def skip_without_namespaces():
    """Skips the test if this machine does not permit network namespaces, also without our code."""
    tries = [["unshare", "--net", "true"], ["unshare", "--map-root-user", "--net", "true"]]
    done = [subprocess.run(t, capture_output=True, text=True, check=False) for t in tries]
    if all(d.returncode for d in done):
        pytest.skip("; ".join(d.stderr.strip() for d in done))
