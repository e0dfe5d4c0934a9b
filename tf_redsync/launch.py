"""Public API of the launcher, and `python -m tf_redsync.launch`; see `cli/launch.py`."""

import sys

from tf_redsync.cli.launch import (
    LaunchResult,
    WorkerResult,
    default_threads,
    free_ports,
    main,
    run,
    tf_config,
)

__all__ = [
    "LaunchResult",
    "WorkerResult",
    "default_threads",
    "free_ports",
    "main",
    "run",
    "tf_config",
]

if __name__ == "__main__":
    sys.exit(main())
