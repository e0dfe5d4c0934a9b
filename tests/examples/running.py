"""Runs a script of examples/ on worker processes, forked from one with all imports."""

from pathlib import Path

from tests.distributed import forks
from tests.distributed.cluster import ENVIRONMENT
from tests.patience import PATIENCE
from tf_redsync import launch

ROOT = Path(__file__).resolve().parents[2]


def run_example(name, *flags, workers=2, env=None, timeout=120, code=0):
    """Runs examples/NAME.py.

    Args:
        name: Name of the script, without its extension.
        *flags: Its command line.
        workers: Number of worker processes.
        env: Additional environment variables. Each distinct set repeats the imports once.
        timeout: Seconds until the workers are ended, for a fast machine; see `tests/patience.py`.
        code: The expected exit code.

    Returns:
        The output of each worker.
    """
    variables = {**ENVIRONMENT, **(env or {})}
    command = forks.command(variables, ROOT / "examples" / f"{name}.py", *map(str, flags))
    job = launch.run(command, workers, env=variables, timeout=PATIENCE * timeout, threads=1)
    outputs = [worker.output for worker in job.workers]
    assert job.exit_code == code, "\n".join(outputs)
    return outputs
