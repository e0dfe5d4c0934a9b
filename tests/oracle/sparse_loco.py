"""SparseLoCo in plain numpy.

Reference: Sarfi, Thérien, Lidin, Belilovsky (2025), "Communication Efficient LLM Pre-training with
SparseLoCo".
"""

from __future__ import annotations

import numpy as np

from tests.oracle.demo import as_matrix, blocks


class SparseLoCoOracle:
    """One exchange of weight changes; `grads[worker][tensor]` are changes over the workers.

    `large(rows)` returns which values of the chunks, `[number, k]`, are at least the mean of their
    chunk. Rounding decides if they are equal to it, so pass the method's comparison.
    """

    def __init__(self, shapes, workers, decay, k, value_bits, divide_by, chunk, large):
        self.errors = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.decay, self.k, self.chunk = np.float32(decay), k, chunk
        self.bits, self.divide_by, self.large = value_bits, divide_by, large

    @property
    def residuals(self):
        return self.errors

    def follow(self, states):
        """Continues from the method's errors, because rounding may change the selection."""
        self.errors = [[np.array(e) for e in state["residual"]] for state in states]

    def step(self, grads):
        return [self._tensor(i, [g[i] for g in grads]) for i in range(len(grads[0]))]

    def _tensor(self, i, changes):
        total = np.zeros(changes[0].shape, np.float32)
        counts = np.zeros_like(total)
        for worker, change in enumerate(changes):
            error = np.array(self.decay * self.errors[worker][i] + change, np.float32, order="C")
            sent = self._sent(error)
            self.errors[worker][i] = error - sent
            total += sent
            counts += self._taken(error)
        if self.divide_by == "senders":
            total = np.where(counts > 0, len(changes) * total / np.maximum(counts, 1), 0)
        return total.astype(np.float32)

    def _limit(self, tensor):
        return self.chunk if tensor.ndim > 1 else self.chunk**2

    def _taken(self, tensor):
        """1 at the k largest magnitudes of each chunk, the first ones among equals."""
        taken = np.zeros(tensor.shape, np.float32)
        limit = self._limit(tensor)
        pairs = zip(blocks(as_matrix(tensor), limit), blocks(as_matrix(taken), limit), strict=True)
        for block, marks in pairs:
            order = sorted(range(block.size), key=lambda j: (-abs(block.flat[j]), j))
            for j in order[: self.k]:
                marks.flat[j] = 1
        return taken

    def _sent(self, tensor):
        sent = tensor * self._taken(tensor)
        if self.bits == 32:
            return sent
        limit, taken = self._limit(tensor), self._taken(tensor)
        pairs = zip(blocks(as_matrix(sent), limit), blocks(as_matrix(taken), limit), strict=True)
        rows = np.array([values[marks > 0] for values, marks in pairs])  # one chunk per row
        if not rows.size:
            return sent
        means = np.abs(rows).mean(axis=1, keepdims=True, dtype=np.float64)
        units = np.abs(rows) / np.where(means > 0, means, 1)
        large = self.large(rows)
        assert (large == (units >= 1))[np.abs(units - 1) > 1e-5].all()
        small = ~large & (means > 0)  # chunks of zeros have no level
        level = np.where(large, _mean(units[large]), _mean(units[small]))
        coded = np.where(rows < 0, -1, 1) * level * means  # two bits cannot encode 0
        pairs = zip(blocks(as_matrix(sent), limit), blocks(as_matrix(taken), limit), strict=True)
        for (values, marks), row in zip(pairs, coded, strict=True):
            values[marks > 0] = row
        return sent


def _mean(values):
    return values.mean() if values.size else 0.0
