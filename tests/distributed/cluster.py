"""Runs a test's function, or a script, on real worker processes under TF_CONFIG.

    def train(steps):                 # at module level of the test file
        import tensorflow as tf
        ...
        return {"weights": weights, "loss": 0.5}

    def test_workers_agree():
        a, b = run_workers(train, args=(3,))
        np.testing.assert_array_equal(a["weights"], b["weights"])

A script or a source text ends with `save(...)` from this module instead. SIGKILL ends workers that
still run after `timeout` seconds. Workers are forks of one process, see `forks.py`.
"""

import faulthandler
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed import forks
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
RESULT_VARIABLE = "TF_REDSYNC_TEST_RESULT"
_STACKS_VARIABLE = "TF_REDSYNC_TEST_STACKS"  # seconds after which a worker prints its stack traces
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}  # for programs with tf_keras: must be set before the imports
TAIL_LINES = 60
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTHONFAULTHANDLER": "1",
}


def run_workers(program, workers=2, args=(), env=None, timeout=120, grace=10, chief=False):
    """Runs `program` on every worker and returns what each of them saved.

    Args:
      program: a function at module level of its file (called with `args`, which must be JSON; it
        returns a dict), the path of a script (`args` become its command line), or a source text.
      workers: number of processes.
      args: arguments, equal for all workers.
      env: additional environment variables. Each distinct set repeats the imports once.
      timeout: seconds until the workers are ended, for a fast machine; see `tests/patience.py`.
      grace: seconds the others get after one has failed.
      chief: whether the first worker is the task "chief" and the others are "worker".

    Returns:
      One dict per worker, in task order: arrays, and Python values for scalars and strings.

    Raises:
      AssertionError: a worker failed, saved nothing, or the timeout was reached. The message has
          the
        last lines of every worker.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = _launch(program, workers, args, env, timeout, grace, Path(folder), chief)
        saved = [Path(folder) / f"result_{i}" for i in range(workers)]
        missing = [i for i, path in enumerate(saved) if not path.exists()]
        if job.exit_code or missing:
            raise AssertionError(_report(job, missing))
        return [_load(path) for path in saved]


def fail_workers(program, workers=2, args=(), env=None, timeout=120, grace=75):
    """Runs a `program` that must fail on every worker without SIGKILL.

    The default grace covers tf.data: an iterator may take a minute to stop while autotuning.

    Returns:
      The last lines of each worker, in task order.

    Raises:
      AssertionError: a worker succeeded, hung, or was still running after the timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = _launch(program, workers, args, env, timeout, grace, Path(folder))
    if any(worker.returncode == 0 or worker.killed for worker in job.workers):
        raise AssertionError("Every worker had to fail of itself.\n" + _report(job, []))
    return [worker.output for worker in job.workers]


def kill_workers(program, workers=2, args=(), env=None, timeout=120):
    """Runs a `program` that ends by `die_together` on every worker.

    Returns:
      What each worker saved before, as `run_workers` does.

    Raises:
      AssertionError: a worker ended in another way, or saved nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = _launch(program, workers, args, env, timeout, 10, Path(folder))
        saved = [Path(folder) / f"result_{i}" for i in range(workers)]
        missing = [i for i, path in enumerate(saved) if not path.exists()]
        ended = {worker.returncode for worker in job.workers}
        if ended != {-signal.SIGKILL} or missing:
            raise AssertionError(_report(job, missing))
        return [_load(path) for path in saved]


def save(**values):
    """Passes arrays, numbers and strings from a worker to the test; call it once."""
    import numpy as np

    arrays = {name: np.asarray(value) for name, value in values.items()}
    objects = [name for name, array in arrays.items() if array.dtype == object]
    if objects:
        raise TypeError(f"Only arrays, numbers and strings can be saved. Received: {objects}.")
    target = Path(os.environ[RESULT_VARIABLE])
    with target.with_suffix(".part").open("wb") as file:
        np.savez(file, **arrays)
    target.with_suffix(".part").rename(target)


def die_together():
    """Ends all workers by SIGKILL when all have called this function.

    If one worker ended earlier, the others would lose its last messages and fail with an error of
    their current step.
    """
    own = Path(os.environ[RESULT_VARIABLE])
    count = sum(len(hosts) for hosts in json.loads(os.environ["TF_CONFIG"])["cluster"].values())
    here = [own.with_name(f"here_{i}") for i in range(count)]
    marker = own.with_name(own.name.replace("result", "here"))
    marker.with_suffix(".part").write_text(str(os.getpid()))
    marker.with_suffix(".part").rename(marker)
    while not all(path.exists() for path in here):
        time.sleep(0.001)
    for path in sorted(here, key=lambda path: path == marker):  # the caller last
        os.kill(int(path.read_text()), signal.SIGKILL)


def _launch(program, workers, args, env, timeout, grace, folder, chief=False):
    from tf_redsync import launch

    timeout *= PATIENCE
    env, stacks = {**ENVIRONMENT, **(env or {})}, {_STACKS_VARIABLE: str(0.9 * timeout)}
    own = [{RESULT_VARIABLE: str(folder / f"result_{i}"), **stacks} for i in range(workers)]
    for variables, task in zip(own, _tasks(workers) if chief else (), strict=False):
        variables["TF_CONFIG"] = json.dumps(task)
    return launch.run(
        forks.command(env, *_script(program, args, folder)),
        workers,
        env=env,
        worker_env=own,
        timeout=timeout,
        grace=grace,
        stop_grace=grace,
        threads=1,
    )


def _tasks(workers):
    """TF_CONFIG of each worker in a cluster with a chief."""
    from tf_redsync import launch

    chief, *others = [f"127.0.0.1:{port}" for port in launch.free_ports(workers)]
    cluster = {"chief": [chief], "worker": others}
    tasks = [("chief", 0), *(("worker", i) for i in range(len(others)))]
    return [{"cluster": cluster, "task": {"type": t, "index": i}} for t, i in tasks]


def _script(program, args, folder):
    """Path of a script, and its arguments."""
    if callable(program):
        if "." in program.__qualname__:
            raise ValueError(f"{program.__qualname__} is not at module level: workers import it.")
        file = program.__code__.co_filename
        return [__file__, file, program.__name__, json.dumps(args)]
    if isinstance(program, Path) or "\n" not in program:
        return [str(program), *map(str, args)]
    script = folder / "worker.py"
    script.write_text(program, encoding="utf-8")
    return [str(script), *map(str, args)]


def _load(path):
    """Loads an archive of arrays, or JSON written by the script."""
    import numpy as np

    if path.read_bytes()[:2] != b"PK":
        return json.loads(path.read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as archive:
        return {k: v.item() if v.ndim == 0 else v for k, v in archive.items()}


def _report(job, missing):
    lines = [job.message or f"Workers {missing} saved nothing."]
    for worker in job.workers:
        tail = "\n".join(worker.output.splitlines()[-TAIL_LINES:])
        lines.append(f"--- worker {worker.index}, exit code {worker.returncode}\n{tail}")
    return "\n".join(lines)


def _work(file, name, args):
    """Entry point of a worker under `run_workers(function)`."""
    if seconds := os.environ.get(_STACKS_VARIABLE):
        faulthandler.dump_traceback_later(float(seconds))
    spec = importlib.util.spec_from_file_location("distributed_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    work = getattr(module, name)
    save(**(work(*json.loads(args)) or {}))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose files must not shadow installed modules
    _work(*sys.argv[1:])
