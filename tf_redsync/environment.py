"""Names and values of the environment variables that workers read."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping

HANDSHAKE = "TF_REDSYNC_HANDSHAKE"  # "0" disables the rendezvous; equal on all workers
JOB = "TF_REDSYNC_JOB"  # optional secret of the job, equal on all its workers
RESTART = "TF_REDSYNC_RESTART"  # number of restarts of the job by the launcher, from 0
START_TIMEOUT = "TF_REDSYNC_START_TIMEOUT"  # seconds
HEARTBEAT = "TF_REDSYNC_HEARTBEAT_SECONDS"


def switched_on(variable: str) -> bool:
    """Return whether a variable is 1 or not set.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(variable) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"`{variable}` must be 0 or 1. Received: {variable}={value!r}")
    return value == "1"


def bypass_proxy(addresses: Iterable[str]) -> None:
    """Exempt workers from the HTTP proxy of the environment, in this process.

    gRPC connects through the proxy of `http_proxy`, even on one machine. Hardly any proxy accepts
    the ports of workers, and TensorFlow would wait for ever.

    Args:
        addresses: `host:port` of each worker.
    """
    exempt = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
    hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
    names = dict.fromkeys(filter(None, [*exempt.split(","), *hosts]))
    os.environ["no_grpc_proxy"] = ",".join(names)


def seconds(
    argument: str,
    value: float | None,
    variable: str,
    low: float = 0.0,
    environ: Mapping[str, str] = os.environ,
) -> float | None:
    """Return a number of seconds: an argument, or else an environment variable, or else `None`.

    Args:
        argument: Name of the argument, for the error.
        value: Value of the argument; `None` if it is not given.
        variable: Name of the environment variable.
        low: Exclusive lower bound in seconds.
        environ: The environment.

    Raises:
        ValueError: the value is not a number above `low`. The message names the argument or the
            variable.
    """
    name: str = argument
    received: object = value
    if value is None and environ.get(variable):
        name = variable
        received = environ[variable]
        try:
            value = float(environ[variable])
        except ValueError:
            value = float("nan")
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not (is_number and value > low):
        raise ValueError(
            f"`{name}` must be a number of seconds above {low:g}. Received: {name}={received!r}"
        )
    return None if value is None else float(value)
