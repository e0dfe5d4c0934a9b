"""A method around another one: what it leaves to the method inside."""

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
    """A method that changes how another one's messages travel, and nothing else.

    It answers as the method inside, or as `Method` without one; a wrapper overrides what it
    changes. `payloads` is not forwarded, because messages differ. Capabilities of the method inside
    are found by `exchange/capabilities.py`.

    Args:
        method: The method inside; `None` where the wrapper is a method by itself.
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
            # Its messages have a form already: another wrapper cannot give them a second one.
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
    """Return the method inside of wrappers; what is none, as it is."""
    inner = getattr(method, "method", None)
    return innermost(inner) if isinstance(inner, Method) else method
