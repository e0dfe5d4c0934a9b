"""Samples of this process's exchange: bytes, density, residuals.

A single worker may sample, because nothing here communicates: per-worker variables are read copy by
copy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.explanation import dense_bytes
from tf_redsync.step import state_variables
from tf_redsync.summary import density_of

RESIDUAL = "residual"
NOTHING_SENT = float("inf")  # compression ratio of several workers that send nothing
_LEAST_SAMPLES = 30  # per `fit`, unless it has fewer steps


@dataclasses.dataclass(frozen=True)
class Sample:
    """State of the exchange after a step.

    Attributes:
        step: Number of exchanges so far.
        bytes_sent: Bytes that this worker has sent in this process.
        skipped: Number of skipped steps so far.
        density: Share of each variable's elements that was sent in the last exchange.
        residual: Norm of each variable's residual; NaN without a residual.
    """

    step: int
    bytes_sent: float
    skipped: int
    density: np.ndarray
    residual: np.ndarray

    @property
    def residual_norm(self) -> float:
        """Norm of all residuals as one vector; 0 without residuals."""
        return float(np.sqrt(np.nansum(np.square(self.residual.astype(np.float64)))))


def interval(every: int, steps: int) -> int:
    """Return the number of steps between two samples, below `every` in a short `fit`.

    Args:
        every: Maximum number of steps.
        steps: Number of steps of the whole `fit`, as far as known.
    """
    return max(1, min(every, steps // _LEAST_SAMPLES))


@dataclasses.dataclass
class Clock:
    """Accumulated time of steps."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        """Add steps and their time."""
        self.steps += steps
        self.seconds += seconds

    @property
    def mean_ms(self) -> float:
        """Mean time per step in milliseconds; NaN without steps."""
        return 1e3 * self.seconds / self.steps if self.steps else math.nan


class Sampler:
    """Sampler of a built exchange.

    Args:
        exchange: A `GradientExchange`.
    """

    def __init__(self, exchange: Any):
        self.exchange = exchange
        self.names = [spec.name for spec in exchange.specs]
        self.sizes = np.array([spec.size for spec in exchange.specs], np.float64)
        self.dense_bytes = dense_bytes(exchange.specs, exchange.workers)
        self._schedule = exchange.schedule
        self._expected = np.ones(len(self.names))
        self._meters: list[tuple[list[int], tf.Variable]] = []
        self._residuals: list[tuple[int, tuple[tf.Variable, ...]]] = []
        for bucket, variables in zip(exchange.schedule.buckets, exchange.states, strict=True):
            positions = [spec.position for spec in bucket.layout.specs]
            self._expected[positions] = [density_of(bucket.method, s) for s in bucket.layout.specs]
            self._find_variables(bucket.layout.index, positions, variables)
        self._norms = tf.function(self._norms_now)

    def _find_variables(self, index: int, positions: list[int], variables: Any) -> None:
        strategy, meter = self.exchange.strategy, self.exchange.schedule.meter
        if meter is not None and index in meter.elements:
            self._meters.append((positions, meter.elements[index]))
        residuals = variables.variables_by_name.get(RESIDUAL, ())
        if len(residuals) == len(positions):
            copies = [state_variables.copies(v, strategy) for v in residuals]
            self._residuals += zip(positions, copies, strict=True)

    @property
    def stale(self) -> bool:
        """Whether the exchange has new variables since `Auto` restored other methods."""
        return self.exchange.schedule is not self._schedule

    def sample(self) -> Sample:
        """Return a sample; call it between two steps."""
        exchange = self.exchange
        density, residual = self._expected.copy(), np.full(len(self.names), np.nan)
        counts, norms = self._norms()
        for (positions, _), count in zip(self._meters, counts, strict=True):
            share = count.numpy() / np.maximum(self.sizes[positions], 1.0)
            density[positions] = np.where(share >= 0.0, share, density[positions])
        if self._residuals:
            residual[[position for position, _ in self._residuals]] = norms.numpy()
        return Sample(
            int(exchange.step.numpy()),
            float(exchange.bytes_in_all.numpy()),
            int(exchange.skipped.numpy()),
            density,
            residual,
        )

    def _norms_now(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the counts of elements and the norms; with several replicas, their means."""
        counts = [variable.read_value() for _, variable in self._meters]
        norms = [
            tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(c.read_value()) for c in copies]) / len(copies))
            for _, copies in self._residuals
        ]
        return counts, tf.stack(norms) if norms else tf.zeros([0])

    def ratio(self, sent: float, steps: int) -> float:
        """Return the bytes of dense all-reduces divided by the bytes sent."""
        if self.exchange.workers == 1:
            return 1.0
        return self.dense_bytes * steps / sent if sent else NOTHING_SENT

    def overall(self, density: np.ndarray) -> float:
        """Return the share of all elements that was sent."""
        return float(np.sum(density * self.sizes) / max(1.0, np.sum(self.sizes)))

    def residuals(self, at_most: int) -> dict[str, np.ndarray]:
        """Return residuals by the names of their variables.

        Args:
            at_most: Maximum number of elements of each, evenly spaced.
        """
        by_name = {}
        for position, copies in self._residuals:
            flat = tf.reshape(copies[0].read_value(), [-1])
            stride = max(1, -(-flat.shape[0] // at_most))
            by_name[self.names[position]] = flat[::stride].numpy()
        return by_name
