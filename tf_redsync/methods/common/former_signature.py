"""Methods that were written for the exchange's former signature.

    def exchange(self, layout, grads, state, step, scale=None)

A class with such an exchange gets one with the present signature around it, and its author a
`DeprecationWarning`. The layout that it sees has the worker's rank, as it had.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout

_NAMES = ("exchange", "dense_exchange")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class _FormerLayout(BucketLayout):
    """A layout with what is in the context now."""

    rank: Any = dataclasses.field(default=0, compare=False)
    rounding: Any = None
    coding: Any = None


def adapt(cls: type) -> None:
    """Put exchanges of the present signature around those of the former one that a class has."""
    for name in _NAMES:
        function = vars(cls).get(name)
        if not inspect.isfunction(function):
            continue
        count = _positional(function)
        if count < 5:  # self, grads, state, ctx
            continue
        warnings.warn(
            f"`{cls.__name__}.{name}` has a former signature, which a later version will not take. "
            f"Write `def {name}(self, grads, state, ctx)`, with `ctx.layout`, `ctx.rank`, "
            "`ctx.step` and `ctx.scale`, and call other methods' exchanges so.",
            DeprecationWarning,
            stacklevel=3,
        )
        setattr(cls, name, _adapted(function, with_scale=count > 5))


def _positional(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in _POSITIONAL for p in parameters)


def _adapted(function: Callable[..., Any], with_scale: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def exchange(self: Any, grads: Any, state: Any, ctx: Context) -> Any:
        layout = _FormerLayout(
            **{f.name: getattr(ctx.layout, f.name) for f in dataclasses.fields(ctx.layout)},
            rank=ctx.rank,
            rounding=ctx.rounding,
            coding=ctx.coding,
        )
        scale = (ctx.scale,) if with_scale else ()
        return function(self, layout, grads, state, ctx.step, *scale)

    return exchange
