"""Measured accuracy losses of the methods; docs/accuracy.md has the measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NONE, _BEYOND_NOISE, _NONE_IN_TWO_TASKS = "none", "none beyond noise", "none in two tasks"
_UNKNOWN = "not measured"
_POWER_SGD = "0.3 to 1.6 points with SGD, 15 % in perplexity with AdamW"
_TRANSLATION = {1: 2.6, 4: 0.6}  # of `CodedTopK`, by bits per value: after 4 and 12 epochs


def _block_quantized_loss(method: Any) -> str:
    if method.bits == 8:
        return _NONE_IN_TWO_TASKS
    return "none with SGD, 0.9 % in perplexity with AdamW" if method.bits == 4 else _UNKNOWN


def _at_3_percent_density(text: str) -> Callable[[Any], str]:
    """Return a function that gives `text` for methods with a density of at least 3 %."""
    return lambda method: text if method.density >= 0.03 else f"{_UNKNOWN} below 3 %"


def _coded_top_k_loss(method: Any) -> str:
    if method.steps > 1:
        return f"{_UNKNOWN} with local steps"
    if method.value_bits not in _TRANSLATION:
        return _UNKNOWN
    if method.value_bits == 1 and method.density >= 0.1:  # which loses more
        return f"{_UNKNOWN} at 10 %"
    loss = f"none in characters, {_TRANSLATION[method.value_bits]} BLEU in translation (beta_1=0)"
    return _at_3_percent_density(loss)(method)


def _coded_adam_loss(method: Any) -> str:
    if method.value_bits not in (1, 4):
        return _UNKNOWN
    extent = "with 4 workers" if method.value_bits == 4 else "(4 epochs) with one seed"
    loss = f"none in characters and translation {extent} (instead of Adam: SGD at its rate)"
    return _at_3_percent_density(loss)(method)


def _in_perplexity(by_setting: dict[Any, str], *names: str) -> Callable[[Any], str]:
    """Return a function that looks up the loss of a method by its arguments `names`."""

    def loss(method: Any) -> str:
        percent = by_setting.get(tuple(getattr(method, name) for name in names))
        return _UNKNOWN if percent is None else f"{percent} % in perplexity"

    return loss


def _redsync_loss(method: Any) -> str:
    as_published = method.density <= 0.001 and method.warm_up is None
    return "8 points in three epochs" if as_published else _UNKNOWN


# Losses by class name, for methods that neither wrap another method nor are wrapped.
_LOSSES: dict[str, Callable[[Any], str]] = {
    "Dense": lambda method: _NONE,
    "HalfPrecision": lambda method: _BEYOND_NOISE,
    "BlockQuantized": _block_quantized_loss,
    "CodedGMC": _at_3_percent_density("0.5 to 2.6 points"),  # an independent test
    "CodedTopK": _coded_top_k_loss,
    "CodedAdam": _coded_adam_loss,
    "RedSync": _redsync_loss,
    # With four and eight workers
    "LocalSGD": _in_perplexity({(15, None): "15 to 21", (50, None): "22 to 29"}, "steps", "outer"),
    "StreamingDiLoCo": _in_perplexity({(50,): "22 to 31"}, "steps"),
    "SparseLoCo": _in_perplexity(
        {(15, 32): "43 to 52", (15, 128): "26 to 34", (50, 128): "40 to 50"}, "steps", "top_k"
    ),
    "PowerSGD": lambda method: _POWER_SGD if method.rank >= 4 else _UNKNOWN,
}


def known_loss(method: Any) -> str:
    """Return a phrase such as "0.5 to 2.6 points" for a method or a policy.

    Args:
        method: A method. Other objects, and wrappers around another method than `Dense`, were not
            measured.

    Returns:
        The loss with its unit, "none" with its limits, or "not measured" with its range.
    """
    inside = getattr(method, "method", None)
    if type(method).__name__ not in _LOSSES or type(inside).__name__ not in ("NoneType", "Dense"):
        return _UNKNOWN
    return _LOSSES[type(method).__name__](method)


def is_lossless(loss: str) -> bool:
    """Return whether a phrase of `known_loss` says that no loss exceeded noise."""
    return loss in (_NONE, _BEYOND_NOISE, _NONE_IN_TWO_TASKS)
