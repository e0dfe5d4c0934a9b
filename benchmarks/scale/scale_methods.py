"""The methods that `scale/scale.py` compares: their traffic grows in different ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import method_settings

if TYPE_CHECKING:
    import tf_redsync as rs

NONE, DENSE = "NoExchange", "Dense"
# A second setting of a class has a suffix after the class's name.
NAMES = (
    NONE,
    DENSE,
    "HalfPrecision",
    "RedSync",
    "RedSync quantized",
    "SparDL",
    "PowerSGD",
    "ACPSGD",
)
# Methods with which a worker receives a whole message from every other one.
GROWING = ("RedSync", "RedSync quantized")


def make(name: str, density: float) -> rs.Method:
    """Returns a method at its defaults except for the density.

    Args:
        name: One of `NAMES`.
        density: For methods with a density.
    """
    options = {"quantized": True} if name.endswith(" quantized") else {}
    return method_settings.for_steps(name.split()[0], density, **options)


def parse(text: str | None) -> list[str]:
    """Returns the methods of a list separated by commas, all for `None`.

    `NoExchange` and `Dense` are always among them: predictions start from them.

    Raises:
        ValueError: for an unknown or repeated name.
    """
    if text is None:
        return list(NAMES)
    chosen = [word.strip() for word in text.split(",")]
    if set(chosen) - set(NAMES) or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`--methods` must be different names out of {', '.join(NAMES)}, separated by commas. "
            f"Received: --methods={text}"
        )
    return [name for name in NAMES if name in chosen or name in (NONE, DENSE)]
