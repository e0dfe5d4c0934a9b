"""A method for ablation studies only: variants of the selection.

Used by `benchmarks/convergence.py --methods "SelectionVariant(density=0.01, age=1.0)"`.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

import tf_redsync as rs
from tf_redsync import checks
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traits import Traits

SCOPES = ("layer", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionVariant(rs.GMC):
    """`GMC` with other selection rules: index and float32 value of k elements.

    Args:
        age: An element that has waited t steps is ranked by |v| (1 + age density t) instead of |v|:
            after the mean wait, 1 / density steps, by 1 + age times |v|.
        oldest: Part of the k elements, in [0, 1), for those that have waited longest.
        scope: Whether the k largest are those of each `"layer"` or of the `"model"`.
        random_ties: Whether elements of equal rank are chosen at random instead of in order.
    """

    age: float = 0.0
    oldest: float = 0.0
    scope: str = "layer"
    random_ties: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("age", self.age, low=0.0, high=float("inf"))
        checks.real("oldest", self.oldest, low=0.0, high=1.0, high_open=True)
        checks.choice("scope", self.scope, SCOPES)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="-",
            state_kinds={**super().traits.state_kinds, "waited": "mean"},
        )

    @override
    def init(self, layout: BucketLayout) -> State:
        waited = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {**super().init(layout), "waited": waited}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        shapes, sizes = [g.shape for g in grads], [s.size for s in ctx.layout.specs]
        own = self.with_momentum(ctx.layout, feedback.scaled(grads, ctx.scale), state)
        v = [tf.reshape(r + g, [-1]) for r, g in zip(state["residual"], own, strict=True)]
        t = [tf.reshape(w, [-1]) + 1.0 for w in state["waited"]]
        k = self.capacities(ctx.layout)
        if self.scope == "model":
            v, t, k = [tf.concat(v, 0)], [tf.concat(t, 0)], [sum(k)]
        chosen = [self._chosen(*parts) for parts in zip(v, t, k, strict=True)]
        values = [tf.gather(a, at) for a, at in zip(v, chosen, strict=True)]
        words = [w for at, x in zip(chosen, values, strict=True) for w in (at, _bits(x))]
        messages = yield AllGather(tf.concat([[1], *words], 0))
        totals, column = [], 1
        for a, count in zip(v, k, strict=True):
            at = tf.reshape(messages[:, column : column + count], [-1, 1])
            x = tf.reshape(messages[:, column + count : column + 2 * count], [-1])
            totals.append(tf.scatter_nd(at, tf.bitcast(x, tf.float32), a.shape))
            column += 2 * count
        kept = [_without(a, at) for a, at in zip(v, chosen, strict=True)]
        waited = [_without(w, at) for w, at in zip(t, chosen, strict=True)]
        if self.scope == "model":
            totals, kept, waited = (tf.split(x[0], sizes) for x in (totals, kept, waited))
        totals, kept, waited = (
            [tf.reshape(x, s) for x, s in zip(tensors, shapes, strict=True)]
            for tensors in (totals, kept, waited)
        )
        return totals, {"residual": kept, "waited": waited, **self.momentum_state(totals)}

    def _chosen(self, v: tf.Tensor, waited: tf.Tensor, k: int) -> tf.Tensor:
        """Positions of the k selected elements, int32."""
        late = int(self.oldest * k)
        score = tf.abs(v) * (1.0 + self.age * self.density * waited)
        first = self._top(score, k - late)
        if not late:
            return first
        rest = tf.tensor_scatter_nd_update(waited, first[:, None], tf.fill([k - late], -1.0))
        return tf.concat([first, self._top(rest, late)], 0)

    def _top(self, score: tf.Tensor, k: int) -> tf.Tensor:
        if not self.random_ties:
            return tf.math.top_k(score, k, sorted=False).indices
        order = tf.random.shuffle(tf.range(tf.size(score)))
        return tf.gather(order, tf.math.top_k(tf.gather(score, order), k, sorted=False).indices)


def _bits(values: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(values, tf.int32)


def _without(values: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(values, at[:, None], tf.zeros(at.shape))
