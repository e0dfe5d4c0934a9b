"""Tables of the digits task, by `benchmarks/methods/digits_training.py`.

Its loopback supports local steps, individual points and delays. This module adds two variations of
the papers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from benchmarks.accuracy.report import Report
from benchmarks.loopback_workers import Exchange, Tensors
from benchmarks.method_expressions import exchanged
from benchmarks.methods import digits_training
from benchmarks.methods.digits_task import Digits
from benchmarks.papers.declared import Row
from tf_redsync.exchange.layout import TensorSpec


class Varied(Exchange):
    """An exchange of the whole model as one tensor, or without error feedback.

    Args:
        policy: See `Exchange`.
        specs: See `Exchange`.
        workers: See `Exchange`.
        row: Selects the variation.
    """

    def __init__(self, policy: Any, specs: Sequence[TensorSpec], workers: int, row: Row):
        self.row, self.shapes = row, [s.shape for s in specs]
        self.sizes = [s.size for s in specs]
        if row.whole_model:  # two axes: a vector would count as a bias
            specs = [TensorSpec("model", (sum(self.sizes), 1))]
        super().__init__(policy, specs, workers)

    def run(self, tensors: Sequence[Tensors], number: int) -> Tensors | None:
        """See `Exchange.run`."""
        if self.row.whole_model:
            tensors = [
                [tf.concat([tf.reshape(t, [-1, 1]) for t in own], axis=0)] for own in tensors
            ]
        totals = super().run(tensors, number)
        if not self.row.feedback:
            self.states = [[_cleared(own) for own in states] for states in self.states]
        if totals is None or not self.row.whole_model:
            return totals
        parts = tf.split(totals[0], self.sizes)
        return [tf.reshape(p, s) for p, s in zip(parts, self.shapes, strict=True)]


def _cleared(state: dict[str, Any]) -> dict[str, Any]:
    residual = {"residual": [tf.zeros_like(r) for r in state.get("residual", [])]}
    return {**state, **residual} if "residual" in state else state


def run(rows: Sequence[Row], args: argparse.Namespace, kept: Report) -> None:
    """Trains all rows with all seeds that the report lacks."""
    for seed in range(args.seeds):
        for number, row in enumerate(rows, 1):
            if kept.row(row.key, seed) is not None:
                continue
            started = time.monotonic()
            result = train(row, seed, args)
            took = time.monotonic() - started
            kept.add({"method": row.key, "seed": seed, "seconds": took, **result})
            print(
                f"seed {seed}, {number}/{len(rows)} {row.what}: loss {result['loss']:.4f}, "
                f"accuracy {result['metric']:.2f}, {result['bits']:.4f} bits ({took:.0f} s)",
                flush=True,
            )


def train(row: Row, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one row; `bits` are those of the whole run, which has no warm-up."""
    task, method = Digits(args.workers, args.batch, seed), exchanged(row.method).method
    exchange = Varied(method, task.specs, task.workers, row)
    found = digits_training.train(task, method, args.learning_rate, args.steps, exchange)
    return {
        "metric": 100 * found["accuracy"],
        "loss": found["loss"],
        "bits": found["bits"],
        "sent_bytes": found["sent_bytes"],
        "skipped": found["skipped"],
        "curve": found["losses"],
    }
