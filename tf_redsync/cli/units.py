"""Numbers with units, as command lines have them."""

from __future__ import annotations

import re

from tf_redsync.planning import PlanError

_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def bytes_per_second(rate: str) -> float:
    """Return a rate such as `"10gbit"` in bytes per second.

    Raises:
        PlanError: for anything but a positive number with kbit, mbit or gbit.

    Example:
        >>> bytes_per_second("2.5gbit")
        312500000.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0.0:
        raise PlanError(
            "`--rate` must be a number with kbit, mbit or gbit, such as 10gbit. "
            f"Received: --rate={rate}"
        )
    return float(match[1]) * _UNITS[match[2]] / 8.0


def share_of(percent: str) -> float:
    """Return a budget such as `"10%"` as a number.

    Raises:
        PlanError: for anything but a positive number with a percent sign.

    Example:
        >>> share_of("10%")
        0.1
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", percent)
    if match is None or float(match[1]) == 0.0:
        raise PlanError(
            "`--max-overhead` must be a number above 0 with a percent sign, such as 10%. "
            f"Received: --max-overhead={percent}"
        )
    return float(match[1]) / 100.0


def milliseconds(text: str) -> float:
    """Return a time such as `"50ms"` or `"50"` in milliseconds.

    Raises:
        ValueError: for anything but a number.

    Example:
        >>> milliseconds("0.2ms")
        0.2
    """
    return float(text.removesuffix("ms"))
