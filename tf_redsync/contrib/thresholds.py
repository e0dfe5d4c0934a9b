"""Methods with a constant threshold: send the elements that reach it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, deliver, sum_messages
from tf_redsync.methods.common.threshold_codes import ThresholdCodes
from tf_redsync.ops import MessageLayout, Selection, wire
from tf_redsync.ops.message_layout import Parts
from tf_redsync.ops.wire import (
    as_column,
    cut,
    joined,
    leading,
)

_SIGN = tf.int32.min  # the sign, in bit 31
_INDEX = tf.int32.max  # the index, in bits 0 to 30
MAX_ELEMENTS = 2**31  # whose indices have 31 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Threshold(Sparsifier):
    """Base class of the methods that send the elements above a threshold."""

    threshold: float = 0.001

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("threshold", self.threshold, low=0.0, high=math.inf, high_open=True)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f">= {self.threshold:g}, at most {self.k(spec)} elements"

    def select(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Selection:
        """Select the elements that reach the threshold."""
        k = self.capacities(ctx.layout)
        thresholds = tf.fill([len(k)], tf.constant(self.threshold, tf.float32))
        return ops.accumulate_and_select(
            grads, state["residual"], [], k, thresholds, selectors="fixed", scale=ctx.scale
        )


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedThreshold(_Threshold):
    """Fixed threshold: indices and values of the elements that reach it.

    Negar Foroutan Eghlidi, Martin Jaggi (2020), "Sparse Communication for Training Deep Networks",
    arXiv 2009.09271. Up to its capacity it is the hard threshold of Sahu et al. (2021), "Rethinking
    Gradient Sparsification as Total Error Minimization", NeurIPS, arXiv 2108.00951.

    On every worker, with gradient g, residual v and threshold tau:

        v <- v + g
        S  = the elements with |v| >= tau
        message = [indices of S, values v[S]]           one all-gather for a bucket of tensors
        v[S] <- 0
        total = sum over workers of v[S]

    The threshold must be tuned for every model. It applies to the gradient of a worker's batch,
    divided by the number of workers, as the exchange receives it.

    Differences from the paper

    * Messages have a fixed capacity, a fraction `density` of every tensor. If more elements reach
      the threshold, the largest are sent and the others stay in the residual.

    Args:
        threshold: tau, at least 0, in units of the gradient over the number of workers.
        density: Maximum fraction of the elements that is sent, in (0, 1]. It sets the capacity of
            messages, which have the same length in every step.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> FixedThreshold(threshold=0.01, density=0.05).threshold
        0.01
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Foroutan Eghlidi, Jaggi 2020",
            requests="all-gather of indices and values",
            bits="64 density",
        )

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        selection = self.select(grads, state, ctx)
        totals, residuals = yield from deliver(ctx, selection)
        return totals, {"residual": residuals}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Strom(_Threshold):
    """Strom: indices and signs of the elements that reach a threshold.

    Nikko Strom (2015), "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
    Interspeech.

    On every worker, with gradient g, residual v and threshold tau:

        v <- v + g
        S  = the elements with |v| >= tau
        message = [index and sign of every element of S]        one all-gather for a bucket
        v[S] <- v[S] - tau sign(v[S])
        total = sum over workers of tau sign(v[S])

    A word has the index in 31 bits and the sign in 1 bit.

    The threshold must be tuned for every model. It applies to the gradient of a worker's batch,
    divided by the number of workers, as the exchange receives it.

    Differences from the paper

    * Messages have a fixed capacity, a fraction `density` of every tensor. If more elements reach
      the threshold, the largest are sent and the others stay in the residual.
    * The paper sends asynchronously and codes the gaps between indices with fewer bits.

    Args:
        threshold: tau, above 0, in units of the gradient over the number of workers.
        density: Maximum fraction of the elements that is sent, in (0, 1]. It sets the capacity of
            messages, which have the same length in every step.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> Strom(threshold=0.01, density=0.05).threshold
        0.01
    """

    threshold: float = 0.01

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        bounds: dict[str, Any] = {"low": 0.0, "high": math.inf, "low_open": True, "high_open": True}
        checks.real("threshold", self.threshold, **bounds)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Strom 2015",
            requests="all-gather of indices with signs",
            bits="32 density",
            rounds_values=False,
            sends_selected=False,
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if spec.size > MAX_ELEMENTS:
            return f"{spec.size} elements, whose indices exceed 31 bits"
        return super().refuses(spec)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        selection = self.select(grads, state, ctx)
        parts = selection.layout.split(selection.message)
        message, residuals = [parts.flags], []
        for i, residual in enumerate(selection.residuals):
            count, indices, values = parts.counts[i], parts.indices[i], parts.values[i]
            message += [count[tf.newaxis], indices | wire.to_words(values) & _SIGN]
            left = values - self._steps(values < 0.0, count)
            flat = tf.reshape(residual, [-1])
            flat = tf.tensor_scatter_nd_add(flat, as_column(indices), left)
            residuals.append(tf.reshape(flat, residual.shape))
        messages = yield AllGather(joined(*message))
        messages = self._unpacked(messages, selection.layout)
        totals = sum_messages(ctx.layout, messages, selection.layout, residuals)
        return totals, {"residual": residuals}

    def _steps(self, negative: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Return tau or -tau in the first `count` slots of the last axis, 0 in the others."""
        tau = tf.constant(self.threshold, tf.float32)
        used = leading(count, negative.shape[-1])
        return tf.where(used, tf.where(negative, -tau, tau), 0.0)

    def _unpacked(self, messages: tf.Tensor, layout: MessageLayout) -> tf.Tensor:
        """Return messages with a value for every index, in the form that `ops.decode` takes."""
        lengths = [length for k in layout.capacities for length in (1, k)]
        flags, *parts = cut(messages, [wire.HEADER_WORDS, *lengths])
        counts, words = parts[0::2], parts[1::2]
        negative = [tf.cast(w, tf.int64) < 0 for w in words]
        values = [self._steps(n, count) for n, count in zip(negative, counts, strict=True)]
        indices = [w & _INDEX for w in words]
        return layout.join(Parts(flags, joined(*counts, axis=1), indices, values))


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoBit(ThresholdCodes):
    """2-bit: the threshold, its negative or zero for every element, with error feedback.

    Nikko Strom (2015), "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
    Interspeech, for the rule; Apache MXNet (2017), "Gradient Compression", for 2-bit codes of all
    elements.

    On every worker, with gradient g and residual e, for each tensor:

        p = g + e,  c = min(threshold * root mean square of p, max |p|)
        code = 1 where p >= c, -1 where p <= -c, else 0
        e <- p - c code
        total = sum over workers of c code              one all-gather of codes and c

    Differences from the papers

    * c follows the scale of p, for each tensor in each step. It is at most max |p|, so that every
      message delivers an element. The constant of the papers, `unit="absolute"`, must be tuned
      again for another batch size or number of workers.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        threshold: Threshold, and magnitude that is sent for an element that reaches it, above 0.
            With unit `"rms"` one standard deviation is near the best choice for normal gradients.
        unit: `"rms"`: relative to the root mean square of gradient plus residual. `"absolute"`: c =
            `threshold`, in units of the gradient that the optimizer receives, which is divided by
            the global batch size. MXNet's 0.5 is for sums over a batch, so elements would hardly
            reach it here. A small threshold delays large elements, because an element sends at most
            c in a step.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Strom 2015; MXNet 2017",
            requests="all-gather of codes and thresholds",
            bits="2",
        )
