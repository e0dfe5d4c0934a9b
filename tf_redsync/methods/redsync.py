"""RedSync: residual gradient compression by trimmed top-k or threshold search.

Jiarui Fang, Haohuan Fu, Guangwen Yang, Cho-Jui Hsieh (2019), "RedSync: Reducing Synchronization
Bandwidth for Distributed Deep Learning Training System", JPDC 133, arXiv 1808.04357.

For every large tensor, on every worker, with gradient g, velocity u, residual v, momentum m:

    u <- m u + g                                momentum correction (Nesterov: u <- m (u + g))
    v <- v + u                                  accumulate          (Nesterov: v <- v + u + g)
    S  = select(v, density)                     trimmed top-k, or binary search of a threshold
    message = [indices of S, values v[S]]       one all-gather for a whole bucket of tensors
    v[S] <- 0,  u[S] <- 0                       residual and momentum factor masking
    total = sum over workers of the messages    scatter-add, rank by rank

By size of the tensor (float32 bytes): below `dense_below` a dense all-reduce, up to
`threshold_above` trimmed top-k, beyond it the threshold search, repeated every `search_interval`
steps and reused in between. Biases and norms (rank 0 and 1) are always dense.

Differences from the paper

* Dense tensors get their momentum after the all-reduce; sparse ones before the selection.
* Messages have a fixed capacity, so one all-gather does: a threshold search that ends outside of
  its accepted band (heavy tails, one outlier, constant input) falls back to the exact top-k
  instead of sending too little or too much.
* The threshold search accepts k/2 < count < 3k/2, the rule of the authors' code for CNNs.
* Indices are int32 bit patterns, never floats.
* In the quantised form the quantisation error is dropped, as in the paper, so the conservation
  law does not hold for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync import checks, feedback, ops
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.methods.base import Exchange, Method, State, register
from tf_redsync.methods.dense import Dense
from tf_redsync.methods.sparse import deliver, element_count, too_small
from tf_redsync.schedules import DenseWarmUp, ExponentialWarmUp

SELECTIONS = ("auto", "exact", "trimmed", "threshold")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RedSync(Method):
    """Residual gradient compression; see the module's docstring for the algorithm.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)).
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
        nesterov: Nesterov's form of the momentum.
        masking: Clear the velocity where a value was sent (momentum factor masking).
        quantized: Send one mean instead of the values, from the positive and the negative side in
            turn. Never applied to the output layer.
        selection: `"auto"` chooses by size; `"exact"`, `"trimmed"` or `"threshold"` for all.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
        threshold_above: Tensors of more float32 bytes use the threshold search.
        search_interval: A threshold is searched every so many steps and reused in between.
        clip_norm: Clip each worker's whole gradient to `clip_norm / sqrt(workers)` before it is
            accumulated. `None` for no clipping. Keeps communication from overlapping with the
            backward pass, since it needs all gradients.
        warm_up: `None`, `DenseWarmUp(steps)` or `ExponentialWarmUp(steps_per_stage)`.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> RedSync(density=0.001, momentum=0.9).density
        0.001
    """

    density: float = 0.001
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    quantized: bool = False
    selection: str = "auto"
    dense_below: int = 128 * 1024
    threshold_above: int = 4096 * 1024
    search_interval: int = 5
    clip_norm: float | None = None
    warm_up: DenseWarmUp | ExponentialWarmUp | None = None

    paper: ClassVar[str] = "Fang, Fu, Yang, Hsieh 2019"
    requests: ClassVar[str] = "all-gather of indices and values"
    bits: ClassVar[str] = "64 density; quantised 32 density"
    state_kinds: ClassVar[dict[str, str]] = {"residual": "sum", "velocity": "sum", "ratios": "mean"}

    def __post_init__(self) -> None:
        checks.real("density", self.density, low=0.0, high=1.0, low_open=True)
        checks.momentum(self.momentum, self.nesterov)
        checks.boolean("masking", self.masking)
        checks.boolean("quantized", self.quantized)
        checks.choice("selection", self.selection, SELECTIONS)
        checks.integer("dense_below", self.dense_below, low=0)
        checks.integer("threshold_above", self.threshold_above, low=0)
        checks.integer("search_interval", self.search_interval, low=1)
        if self.threshold_above < self.dense_below:
            raise ValueError(
                "`threshold_above` must not be smaller than `dense_below`. Received: "
                f"threshold_above={self.threshold_above}, dense_below={self.dense_below}"
            )
        if self.clip_norm is not None:
            checks.real("clip_norm", self.clip_norm, low=0.0, high=float("inf"), low_open=True)
        if not isinstance(self.warm_up, (DenseWarmUp, ExponentialWarmUp, type(None))):
            raise ValueError(
                "`warm_up` must be None, DenseWarmUp(...) or ExponentialWarmUp(...). "
                f"Received: warm_up={self.warm_up!r}"
            )

    @property
    def conserves(self) -> bool:
        """See `Method`. Momentum adds its own mass, quantisation drops its error."""
        return self.momentum == 0.0 and not self.quantized

    @property
    def momentum_in_exchange(self) -> float:
        """See `Method`."""
        return self.momentum

    @property
    def warm_up_steps(self) -> int:
        """See `Method`."""
        return self.warm_up.steps if isinstance(self.warm_up, DenseWarmUp) else 0

    def refuses(self, spec: TensorSpec) -> str | None:
        """See `Method`."""
        return too_small(spec, self.dense_below)

    def dense(self) -> Method:
        """See `Method`."""
        return Dense(momentum=self.momentum, nesterov=self.nesterov)

    def selector(self, spec: TensorSpec) -> str:
        """Name of the selection used for a tensor, by its size."""
        if self.selection != "auto":
            return self.selection
        return "threshold" if spec.bytes > self.threshold_above else "trimmed"

    def quantizes(self, spec: TensorSpec) -> bool:
        """Whether a tensor's values are replaced by one mean."""
        return self.quantized and not spec.output_layer

    def describe(self, spec: TensorSpec) -> str:
        """See `Method`."""
        return self.selector(spec) + (", one mean" if self.quantizes(spec) else "")

    def clip_scale(self, grads: list[tf.Tensor], workers: int) -> tf.Tensor | None:
        """See `Method`."""
        norm = self.clip_norm
        return None if norm is None else feedback.local_clip_scale(grads, norm, workers)

    def k(self, spec: TensorSpec, density: float | None = None) -> int:
        """Number of elements of a tensor that are sent at a density (default: the final one)."""
        return element_count(self.density if density is None else density, spec.size)

    def init(self, layout: BucketLayout) -> State:
        """See `Method`."""
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {
            "residual": zeros,
            "velocity": list(zeros) if self.momentum else [],
            "ratios": [tf.fill([len(layout.specs)], -1.0)],
        }

    def exchange(
        self,
        layout: BucketLayout,
        grads: list[tf.Tensor],
        state: State,
        step: tf.Tensor,
        scale: tf.Tensor | None = None,
    ) -> Exchange:
        """See `Method`."""
        k = self._k(layout, step)
        form: dict[str, Any] = {
            "selectors": tuple(self.selector(s) for s in layout.specs),
            "quantized": tuple(self.quantizes(s) for s in layout.specs),
        }
        selection = ops.accumulate_and_select(
            grads,
            state["residual"],
            state["velocity"],
            k,
            state["ratios"][0],
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masking,
            scale=scale,
            side=tf.cast(1 - 2 * (step % 2), tf.int32),
            search=tf.equal(step % self.search_interval, 0),
            **form,
        )
        fixed_k = self._static_k(layout, step)
        totals = yield from deliver(layout, selection.message, fixed_k or k, grads, **form)
        return totals, {
            "residual": list(selection.residuals),
            "velocity": list(selection.velocities),
            "ratios": [selection.ratios],
        }

    def dense_exchange(
        self,
        layout: BucketLayout,
        grads: list[tf.Tensor],
        state: State,
        step: tf.Tensor,
        scale: tf.Tensor | None = None,
    ) -> Exchange:
        """All-reduce of the momentum-corrected gradients; velocities go on as in `exchange`."""
        grads, u = feedback.scaled(grads, scale), state["velocity"]
        contributions, velocity = feedback.momentum_step(grads, u, self.momentum, self.nesterov)
        totals = yield AllReduce(contributions)
        return totals, {**state, "velocity": velocity}

    def _k(self, layout: BucketLayout, step: tf.Tensor) -> tf.Tensor:
        """Elements to send of every tensor at `step`, int32 of shape `[tensors]`."""
        static = self._static_k(layout, step)
        if static is not None:
            return tf.constant(static, tf.int32)
        # Python's rounding for every stage, picked by step: all workers see the same integers.
        ramp = self.warm_up
        assert isinstance(ramp, ExponentialWarmUp)
        last = len(ramp.densities)
        densities = [ramp.density(i * ramp.steps_per_stage, self.density) for i in range(last + 1)]
        stages = [[self.k(s, density) for s in layout.specs] for density in densities]
        return tf.constant(stages, tf.int32)[tf.minimum(step // ramp.steps_per_stage, last)]

    def _static_k(self, layout: BucketLayout, step: tf.Tensor) -> list[int] | None:
        """`_k` as Python integers, `None` where it depends on a step not known in the trace."""
        density = self.density
        if isinstance(self.warm_up, ExponentialWarmUp):
            known = tf.get_static_value(step)
            if known is None:
                return None
            density = self.warm_up.density(int(known), self.density)
        return [self.k(s, density) for s in layout.specs]
