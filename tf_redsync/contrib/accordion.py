"""Top-k with a larger density in critical regimes of the training."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import (
    Sparsifier,
    deliver,
    element_count,
    selected_payloads,
)
from tf_redsync.ops import MessageLayout


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Accordion(Sparsifier):
    """Accordion: top-k with a larger density while the gradient norm of a layer changes fast.

    Saurabh Agarwal, Hongyi Wang, Kangwook Lee, Shivaram Venkataraman, Dimitris Papailiopoulos
    (2021), "Accordion: Adaptive Gradient Communication via Critical Learning Regime
    Identification", MLSys, arXiv 2010.16248, algorithm 1.

    On every worker, with gradient g and residual v, for each tensor of n elements:

        k = d n in a critical regime, else d' n                 d' < d
        v <- v + g
        S  = the k elements of v with the largest |v|
        message = [indices of S, values v[S]];  v[S] <- 0       one all-gather
        total = sum over workers of the messages
        a <- a + total                                          accumulated over an interval

    At the end of every interval, for each tensor:

        critical <- | |a'| - |a| | >= eta |a'|                  a': of the interval before
        a' <- a,  a <- 0

    The first two intervals are critical.

    Differences from the paper

    * The accumulated gradients are the delivered totals. All workers have these totals, so they
      detect the same regime without a further message. The norm excludes the residuals.
    * An interval is a number of steps, because the exchange does not know the epochs.
    * The paper also compresses less when the learning rate is about to decay. The exchange does not
      know the learning rate. A decay has an effect in the next interval, if it changes the norm.
    * The compressor is layer-wise top-k. The paper also adapts PowerSGD and the batch size.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        density: d, the fraction of the elements that is sent in critical regimes, in (0, 1].
        low_density: d', the fraction that is sent otherwise, in (0, `density`]. `None`: a tenth of
            `density`.
        eta: Relative change of the norm from which a regime is critical; 0.5 in the paper.
        interval: Steps from one detection of the regimes to the next. The paper uses an epoch. Make
            it longer than 1 / `low_density` steps, in which a residual is delivered. Otherwise a
            change of the density changes the norm as a critical regime does.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> spec = TensorSpec("kernel", (100, 100))
        >>> Accordion(density=0.1).describe(spec)
        '1000 of 10000 elements in critical regimes, else 100'
    """

    density: float = 0.1
    low_density: float | None = None
    eta: float = 0.5
    interval: int = 1000

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_density is not None:
            checks.real("low_density", self.low_density, low=0.0, high=self.density, low_open=True)
        checks.positive("eta", self.eta)
        checks.integer("interval", self.interval, low=1)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Agarwal, Wang, Lee, Venkataraman, Papailiopoulos 2021",
            requests="all-gather of indices and values",
            bits="64 density; outside of critical regimes 64 low_density",
            state_kinds={
                "residual": "sum",
                "accumulated": "shared",
                "previous": "shared",
                "critical": "shared",
                "steps": "shared",
            },
            waiting_steps=1.0 / self._lower_density,
            density_changes=True,
        )

    @property
    def _lower_density(self) -> float:
        return self.density / 10.0 if self.low_density is None else self.low_density

    def low_k(self, spec: TensorSpec) -> int:
        """Return the number of elements of a tensor to send outside of critical regimes."""
        return element_count(self._lower_density, spec.size)

    @override
    def describe(self, spec: TensorSpec) -> str:
        numbers = f"{self.k(spec)} of {spec.size} elements"
        return f"{numbers} in critical regimes, else {self.low_k(spec)}"

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return zero sums and norms and a critical regime for each tensor, and the step count.

        `steps` is the number of steps in this interval, one scalar for all tensors.
        """
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {
            "residual": zeros,
            "accumulated": list(zeros),
            "previous": [tf.constant(0.0) for _ in layout.specs],
            "critical": [tf.constant(True) for _ in layout.specs],
            "steps": [tf.constant(0, tf.int64)],
        }

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        """Return the payloads of steps outside of critical regimes, which are the majority."""
        return selected_payloads(MessageLayout.of(list(map(self.low_k, layout.specs))))

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        # Dense totals, because they are added to `accumulated`.
        ctx = dataclasses.replace(ctx, layout=dataclasses.replace(ctx.layout, sparse_totals=False))
        k = self._counts(ctx.layout, state["critical"])
        selection = ops.accumulate_and_select(grads, state["residual"], [], k, scale=ctx.scale)
        totals, residuals = yield from deliver(ctx, selection)
        return totals, {**self._updated(state, totals), "residual": residuals}

    def _counts(self, layout: BucketLayout, critical: list[tf.Tensor]) -> list[int] | tf.Tensor:
        """Return the elements to send of each tensor: integers, or int32 `[tensors]` in a trace."""
        pairs = [(self.low_k(s), self.k(s)) for s in layout.specs]
        known = [tf.get_static_value(c) for c in critical]
        if None not in known:
            return [pair[int(c)] for pair, c in zip(pairs, known, strict=True)]
        return tf.stack([tf.where(c, k, low) for (low, k), c in zip(pairs, critical, strict=True)])

    def _updated(self, state: State, totals: list[tf.Tensor]) -> State:
        """Return the shared state after a step with these totals."""
        sums = [a + t for a, t in zip(state["accumulated"], totals, strict=True)]
        steps, previous = state["steps"][0] + 1, state["previous"]

        def next_interval() -> State:
            norms = [tf.norm(a) for a in sums]
            return {
                "accumulated": [tf.zeros_like(a) for a in sums],
                "previous": norms,
                "critical": [
                    tf.abs(old - new) >= self.eta * old
                    for old, new in zip(previous, norms, strict=True)
                ],
                "steps": [tf.zeros_like(steps)],
            }

        def same_interval() -> State:
            return {
                "accumulated": sums,
                "previous": [tf.identity(p) for p in previous],
                "critical": [tf.identity(c) for c in state["critical"]],
                "steps": [steps],
            }

        return tf.cond(steps >= self.interval, next_interval, same_interval)
