"""Measured losses of accuracy, by setting, which warnings quote.

A warning quotes the row nearest to the user's setting; nothing is interpolated. The figures are
those of docs/accuracy.md, docs/adaptive.md, docs/benchmarks.md and docs/warm-up.md, which have the
commands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from tf_redsync.exchange.method import Method
from tf_redsync.methods.common.wrapper import innermost
from tf_redsync.methods.sparse_loco import SparseLoCo

_Number = TypeVar("_Number", int, float)

# Accuracy in % on CIFAR-10, three epochs, by density: with one mean, and with all values.
_ONE_MEAN = {0.001: (58.1, 63.7), 0.01: (62.6, 67.5), 0.1: (66.0, 68.2)}
# The same with momentum of the inner optimizer, of the method, and a global one; of this method.
_MOMENTUM = {0.001: (60.8, 61.7, 64.0, "RedSync"), 0.03: (66.8, 67.9, 69.2, "CodedTopK")}
# Perplexity on characters, 600 steps, by density: with a beta_1 of 0.9, and of 0; with these.
_BETA_1 = {0.01: (12.2, 8.4, "CompAMS and AMSGrad"), 0.03: (10.2, 7.3, "CodedTopK and AdamW")}
# Perplexity on characters, 600 steps of AdamW, which ends with 7.6 after dense exchanges.
_LOW_RANK = {"PowerSGD": 8.7, "ACPSGD": 10.4}
# Perplexity on characters, 1,000 steps of AdamW, by the momentum of the outer optimizer and the
# number of local steps. `None`: nothing was lost.
_DENSE = 6.49
_LOCAL: dict[float, dict[int, float | None]] = {
    0.0: {8: None, 15: 7.45, 50: 7.89},
    0.5: {15: 7.36, 50: 7.88},
    0.9: {15: 11.06, 50: 9.41, 250: 9.14},
}
_STREAMING = {50: 7.96}
_SPARSE = {(15, 32): 9.25, (15, 128): 8.16, (50, 128): 9.10}  # by `steps` and `top_k`


def one_mean(density: float) -> str:
    """Return what one mean in place of all values costs at a density."""
    at = _nearest(_ONE_MEAN, density)
    one, all_values = _ONE_MEAN[at]
    return f"{one} % in place of {all_values} % on CIFAR-10 (3 epochs, density {100 * at:g} %)"


def late_momentum(density: float) -> str:
    """Return what momentum of the inner optimizer costs at a density."""
    at = _nearest(_MOMENTUM, density)
    inner, own, shared, method = _MOMENTUM[at]
    return (
        f"{inner} % in place of {own} % with the method's own momentum and {shared} % with a "
        f"global one on CIFAR-10 ({method}, 3 epochs, density {100 * at:g} %)"
    )


def late_beta_1(density: float) -> str:
    """Return what a beta_1 of Adam costs at a density."""
    at = _nearest(_BETA_1, density)
    adam, without, of = _BETA_1[at]
    return (
        f"a perplexity of {adam} in place of {without} without it on characters ({of}, 600 steps, "
        f"density {100 * at:g} %)"
    )


def low_rank(name: str) -> str:
    """Return what a method of low rank costs with Adam."""
    return (
        f"a perplexity of {_LOW_RANK[name]} in place of 7.6 with Dense() on characters (AdamW, "
        "600 steps, rank 4)"
    )


def long_rounds(method: Method) -> str | None:
    """Return what rounds of local steps cost, of the nearest setting that was measured.

    `None` where the nearest one lost nothing.
    """
    schedule, inside = method.sync_schedule, innermost(method)
    if isinstance(inside, SparseLoCo):
        near = min(_SPARSE, key=lambda at: (_far(at[0], inside.steps), _far(at[1], inside.top_k)))
        said, perplexity = f"SparseLoCo(steps={near[0]}, top_k={near[1]})", _SPARSE[near]
    elif schedule.fragments:
        at = _nearest(_STREAMING, schedule.local_steps)
        said, perplexity = f"StreamingDiLoCo(steps={at})", _STREAMING[at]
    else:
        momentum = float(getattr(schedule.outer, "momentum", 0.0))
        outer = min(_LOCAL, key=lambda known: abs(known - momentum))
        at = _nearest(_LOCAL[outer], schedule.local_steps)
        found = _LOCAL[outer][at]
        if found is None:
            return None
        said, perplexity = f"LocalSGD(steps={at})", found
        if outer:
            said = f"DiLoCo(steps={at}) with an outer momentum of {outer}"
    return (
        f"a perplexity of {perplexity} with {said}, the nearest setting that was measured, in "
        f"place of {_DENSE} in dense training, on characters (AdamW, 1,000 steps)"
    )


def _nearest(known: Mapping[_Number, Any], value: float) -> _Number:
    """Return the number nearest to a value, by their ratio."""
    return min(known, key=lambda at: _far(at, value))


def _far(one: float, other: float) -> float:
    return abs(math.log(one / other))
