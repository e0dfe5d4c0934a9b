"""Base class of methods that wrap another one."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.capabilities import Wrapping
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodWrapper(Wrapping, Method):
    """A method that changes the messages of another one.

    It delegates all members except `payloads` to the wrapped method, or to `Method` without one.
    Subclasses override the members that they change. `exchange/capabilities.py` finds the
    capabilities of the wrapped method.

    Args:
        method: The wrapped method; `None` for a wrapper that is used by itself.
    """

    method: Method | None = None

    @property
    def _inside(self) -> Method:
        return Method() if self.method is None else self.method

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            self._inside.traits,
            paper="",
            requests="",
            bits="",
            # Its messages are already coded or rounded, so a second wrapper must not do so.
            sends_selected=False,
            rounds_values=False,
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return self._inside.sync_schedule

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return self._inside.refuses(spec)

    @override
    def dense(self) -> Method:
        return self._inside.dense()

    @override
    def describe(self, spec: TensorSpec) -> str:
        return self._inside.describe(spec)

    @override
    def init(self, layout: BucketLayout) -> State:
        return self._inside.init(layout)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        return self._inside.exchange(grads, state, ctx)

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        return self._inside.dense_exchange(grads, state, ctx)


def innermost(method: Any) -> Any:
    """Return the innermost wrapped method; an object that is no wrapper is returned unchanged."""
    inner = getattr(method, "method", None)
    return innermost(inner) if isinstance(inner, Method) else method
