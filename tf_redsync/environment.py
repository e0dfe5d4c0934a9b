"""The environment variables that workers read; the launcher sets some of them."""

from __future__ import annotations

import os

HANDSHAKE = "TF_REDSYNC_HANDSHAKE"  # "0": no rendezvous; set it for all workers or none
JOB = "TF_REDSYNC_JOB"  # the job's secret, the same for all its workers; may be missing
RESTART = "TF_REDSYNC_RESTART"  # how often the launcher has started the job anew, from 0
START_TIMEOUT = "TF_REDSYNC_START_TIMEOUT"  # seconds
HEARTBEAT = "TF_REDSYNC_HEARTBEAT_SECONDS"


def switched_on(variable: str) -> bool:
    """Whether a variable is 1, or missing.

    Raises:
        ValueError: if it is neither 0 nor 1.
    """
    value = os.environ.get(variable) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"`{variable}` must be 0 or 1. Received: {variable}={value!r}")
    return value == "1"


def seconds(argument: str, value: float | None, variable: str, low: float = 0.0) -> float | None:
    """Return an argument, or else what the environment says; `None` if neither does.

    Raises:
        ValueError: naming the one of both that is no number above `low`.
    """
    name: str = argument
    given: object = value
    if value is None and os.environ.get(variable):
        name = variable
        given = os.environ[variable]
        try:
            value = float(os.environ[variable])
        except ValueError:
            value = float("nan")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > low):
        raise ValueError(
            f"`{name}` must be a number of seconds above {low:g}. Received: {name}={given!r}"
        )
    return value
