"""Command line: `python -m tf_redsync.launch`. The code is in `tf_redsync.cli.launch`."""

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
