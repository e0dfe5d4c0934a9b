"""Validation of arguments, shared by methods, schedules, callbacks and optimizers."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_NUMBERS = (int, float, np.integer, np.floating)  # JSON stores no Fraction or Decimal


def to_python(value: Any) -> Any:
    """Return the Python value of a NumPy scalar; any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def real(
    name: str,
    value: Any,
    *,
    low: float,
    high: float,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Check that an argument is a number in an interval.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        low: Lower bound.
        high: Upper bound.
        low_open: Whether the interval excludes `low`.
        high_open: Whether the interval excludes `high`.

    Raises:
        ValueError: `value` is not a number or outside the interval; the message has `name`.
    """
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    inside = is_number and (
        (value > low if low_open else value >= low)
        and (value < high if high_open else value <= high)
    )
    if not inside:
        raise ValueError(
            f"`{name}` must be in {interval}. Received: {name}={value!r}{class_hint(value)}"
        )


def positive(name: str, value: Any) -> None:
    """Check that an argument is a finite number above 0.

    Raises:
        ValueError: `value` is not such a number; the message has `name`.
    """
    real(name, value, low=0.0, high=float("inf"), low_open=True, high_open=True)


def integer(name: str, value: Any, *, low: int) -> None:
    """Check that an argument is an integer of at least `low`.

    Raises:
        ValueError: `value` is not an integer or below `low`; the message has `name`.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < low:
        raise ValueError(f"`{name}` must be an integer >= {low}. Received: {name}={value!r}")


def steps_or_fraction(name: str, value: Any) -> None:
    """Check that an argument is a number of steps, or a fraction of training in (0, 1).

    Raises:
        ValueError: `value` is neither of them; the message has `name`.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    is_fraction = isinstance(value, _NUMBERS) and 0.0 < float(value) < 1.0
    if not is_fraction and not (is_integer and int(value) >= 1):
        raise ValueError(
            f"`{name}` must be a number of steps (an integer >= 1) or a fraction in (0, 1) of the "
            f"steps that `fit` runs. Received: {name}={value!r}"
        )


def boolean(name: str, value: Any) -> None:
    """Check that an argument is `True` or `False`.

    Raises:
        ValueError: `value` is not a bool; the message has `name`.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}")


def choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that an argument is one of some strings, or of some integers.

    Raises:
        ValueError: `value` is not in `choices`; the message has `name`.
    """
    if isinstance(value, bool) or not isinstance(value, type(choices[0])) or value not in choices:
        raise ValueError(f"`{name}` must be one of {choices}. Received: {name}={value!r}")


def make_tuple(instance: Any, name: str) -> None:
    """Replace the sequence in a field of a frozen dataclass by a tuple of Python values.

    Raises:
        ValueError: the field is neither a list nor a tuple; the message has `name`.
    """
    value = getattr(instance, name)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` must be a tuple. Received: {name}={value!r}{class_hint(value)}")
    object.__setattr__(instance, name, tuple(map(to_python, value)))


def no_url(name: str, path: str | os.PathLike[str]) -> None:
    """Check that a path is not a URL; the standard library reads `gs://...` as a local folder.

    Raises:
        ValueError: `path` is a URL; the message has `name`.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            f"`{name}` must be a path in a mounted file system, not a URL. "
            f"Received: {name}={path!r}"
        )


def pattern(name: str, value: Any) -> None:
    """Check that an argument is a regular expression.

    Raises:
        ValueError: `value` is not a valid regular expression; the message has `name`.
    """
    try:
        if not isinstance(value, str):
            raise TypeError("a text, so that it can be saved")
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`{name}` must be a regular expression ({error}). Received: {name}={value!r}"
        ) from error


def momentum(value: Any, nesterov: bool) -> None:
    """Check a momentum coefficient and its Nesterov flag.

    Raises:
        ValueError: `value` is outside [0, 1), `nesterov` is not a bool, or `nesterov` is set and
            `value` is 0.
    """
    boolean("nesterov", nesterov)
    real("momentum", value, low=0.0, high=1.0, high_open=True)
    if nesterov and value == 0.0:
        raise ValueError(
            "`nesterov=True` needs a momentum. Received: nesterov=True, momentum=0.0. "
            "Set `momentum`, e.g. momentum=0.9, or nesterov=False."
        )


def class_hint(value: Any) -> str:
    """Return a hint for an error message if a class was passed in place of an instance."""
    return f". It is a class: call it, {value.__name__}(...)" if isinstance(value, type) else ""


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return the sentence of an error message that suggests an argument for an unknown name."""
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"Did you mean `{close[0]}`?"
    return f"Arguments: {', '.join(names)}." if names else "It has none."


# Horovod's names and their replacements, for errors; docs/migrating.md has more.
_COLLECTIVE = "a collective of the strategy or of the replica context"
_OF_HOROVOD = {
    "Compression": "the argument `method`, such as rs.HalfPrecision()",
    "DistributedGradientTape": "rs.DistributedOptimizer, which exchanges the gradients",
    "allgather": _COLLECTIVE,
    "allreduce": _COLLECTIVE,
    "backward_passes_per_step": "`gradient_accumulation_steps` of the inner Keras 3 optimizer",
    "broadcast_variables": "the strategy, which starts all workers from the chief's weights",
    "compression": "`method`, such as rs.HalfPrecision()",
    "groups": "`bucket_bytes`",
    "init": "rs.MultiWorkerMirroredStrategy()",
    "local_rank": "nothing: the launcher gives each worker its GPUs",
    "sparse_as_dense": "nothing: slices are always added to dense gradients",
}


def horovod_hint(name: str) -> str:
    """Return a sentence on the replacement of a name of Horovod; "" for other names."""
    use = _OF_HOROVOD.get(name)
    return f"In place of Horovod's `{name}` use {use} (docs/migrating.md)." if use else ""


def suggesting(new: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `__new__` so that the error for an unknown argument suggests a known one."""
    names = [n for n in inspect.signature(new).parameters if n != "cls"]

    @functools.wraps(new)
    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                hint = horovod_hint(name) or suggestion(name, names)
                raise TypeError(f"{cls.__name__} has no argument `{name}`. {hint}")
        return new(cls, *args, **kwargs)

    return made
