"""RedSync in plain numpy: residual sparsification with momentum correction.

A worker adds its gradient to a residual, sends the largest elements of the residual and sets them
to zero. The optimizer applies the sum of these elements over the workers. With t = scale * g:

    u' = m u + t,  v' = v + u',  S = select(v', k),  send v'[S],  v'[S] = 0,  u'[S] = 0

Elementwise arithmetic is float32 without fused multiply-add, sums are float64, ties go to the lower
index.

Reference: Fang, Fu, Yang and Hsieh, "RedSync: Reducing synchronization bandwidth for distributed
deep learning training system", JPDC 2019 (arXiv 1808.04357). Momentum correction, masking, local
clipping and the exponential warm-up: Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SELECTORS = ("exact", "trimmed", "threshold", "fixed")
PROBES = 10  # maximum probes of one threshold search


# ---------------------------------------------------------------------------------------- selection


def top_k_numpy(a: np.ndarray, k: int) -> np.ndarray:
    """Ascending indices of the `k` largest positive elements of `a`; ties: the lower index."""
    order = np.argsort(-a, kind="stable")[:k]
    return np.sort(order[a[order] > 0])


def trimmed_candidates_numpy(a: np.ndarray, k: int) -> np.ndarray:
    """Indices above m + ratio (M - m), for the first ratio of 0.8, 0.6, .. 0.0 with `k` or more.

    m is the mean and M the maximum of `a`. If fewer than `k` elements are above the mean (for
    constant input, say), all indices are returned: the paper's loop would not end.
    """
    if a.size == 0:
        return np.arange(0)
    wide = a.astype(np.float64)
    mean, largest = wide.mean(), wide.max()
    for ratio in (0.8, 0.6, 0.4, 0.2, 0.0):
        candidates = np.flatnonzero(wide > mean + ratio * (largest - mean))
        if candidates.size >= k:
            return candidates
    return np.arange(a.size)


def trimmed_top_k_numpy(a: np.ndarray, k: int) -> np.ndarray:
    """Exact top-k of the trimmed candidates: the same indices as `top_k_numpy`."""
    candidates = trimmed_candidates_numpy(a, k)
    return candidates[top_k_numpy(a[candidates], k)]


def above_ratio_numpy(a: np.ndarray, ratio: float) -> np.ndarray:
    """Indices of positive elements above t = (float32)(m + ratio (M - m)), m and M in float64."""
    mean = a.sum(dtype=np.float64) / a.size
    largest = np.float64(a.max())
    threshold = np.float32(mean + np.float64(ratio) * (largest - mean))
    return np.flatnonzero((a > threshold) & (a > 0))


def in_band(count: int, k: int) -> bool:
    """Whether 3/4 k < count <= k, in integers."""
    return 4 * count > 3 * k and count <= k


def threshold_search_numpy(a: np.ndarray, k: int) -> tuple[np.ndarray, np.float32]:
    """Bisects the ratio in [0, 1] until the count is in the band; else exact top-k and ratio -1."""
    low, high = np.float64(0), np.float64(1)
    for _ in range(PROBES):
        mid = (low + high) / 2
        chosen = above_ratio_numpy(a, np.float32(mid))
        if in_band(chosen.size, k):
            return chosen, np.float32(mid)
        if 4 * chosen.size <= 3 * k:
            high = mid  # too few: lower the threshold
        else:
            low = mid
    return top_k_numpy(a, k), np.float32(-1)


def select_numpy(
    a: np.ndarray, k: int, selector: str, ratio: float, search: bool
) -> tuple[np.ndarray, np.float32]:
    """Selects from the flat array `a`; returns (ascending indices, new ratio)."""
    if selector == "fixed":  # an absolute threshold (Strom 2015); k is the capacity
        chosen = np.flatnonzero((a >= ratio) & (a > 0))
        return chosen[top_k_numpy(a[chosen], k)], np.float32(ratio)
    if k >= a.size:  # density 1 loses nothing
        return np.flatnonzero(a > 0), np.float32(-1)
    if selector == "exact":
        return top_k_numpy(a, k), np.float32(-1)
    if selector == "trimmed":
        return trimmed_top_k_numpy(a, k), np.float32(-1)
    if selector != "threshold":
        raise ValueError(f"`selector` must be one of {SELECTORS}. Received: selector={selector!r}.")
    if not search and ratio >= 0:
        chosen = above_ratio_numpy(a, ratio)
        if in_band(chosen.size, k):
            return chosen, np.float32(ratio)
    return threshold_search_numpy(a, k)


# ------------------------------------------------------------------------------------------ message


def bits(x) -> np.ndarray:
    """The bits of float32 `x` as int32."""
    return np.atleast_1d(np.asarray(x, np.float32)).view(np.int32)


def accumulate_numpy(g, v, u, momentum: float, nesterov: bool, scale) -> tuple:
    """Adds one gradient to residual `v` and velocity `u` (None without momentum), in float32."""
    m = np.float32(momentum)
    t = g if scale is None else np.float32(scale) * g
    if momentum == 0:
        return v + t, None
    if nesterov:
        u = m * (u + t)
        return (v + u) + t, u
    u = (m * u) + t
    return v + u, u


def pack_numpy(v, chosen, slots: int, quantized: bool) -> list[np.ndarray]:
    """One tensor's int32 words: [count, index * slots, value * slots] or [count, mean, index..]."""
    index = np.zeros(slots, np.int32)
    index[: chosen.size] = chosen
    count = np.array([chosen.size], np.int32)
    if quantized:
        mean = v[chosen].sum(dtype=np.float64) / chosen.size if chosen.size else 0.0
        return [count, bits(mean), index]
    value = np.zeros(slots, np.float32)
    value[: chosen.size] = v[chosen]
    return [count, index, bits(value)]


def accumulate_and_select_numpy(
    grads, residuals, velocities, k, ratios, *, selectors, quantized,
    momentum=0.0, nesterov=False, masking=True, scale=None, side=1, search=True,
):  # fmt: skip
    """One worker, one step, N tensors; arguments as in `tf_redsync.ops.accumulate_and_select`.

    Returns:
        (message int32 [W], residuals, velocities, ratios float32 [N]). If anything is not finite,
        the message is all zero, the ratios are unchanged, and residuals and velocities must not be
        used.
    """
    parts, new_v, new_u, new_ratios = [], [], [], []
    finite = True
    with np.errstate(invalid="ignore", over="ignore"):
        for i, g in enumerate(grads):
            g = np.asarray(g, np.float32)
            shape, u_old = g.shape, velocities[i].reshape(-1) if momentum else None
            v, u = accumulate_numpy(
                g.reshape(-1), residuals[i].reshape(-1), u_old, momentum, nesterov, scale
            )
            finite &= bool((np.abs(v) < 2.0**96).all())  # false for NaN
            if selectors[i] == "fixed":
                finite &= not np.isnan(ratios[i])
            a = np.float32(side) * v if quantized[i] else np.abs(v)
            if finite:
                reuse = not search and not quantized[i]
                chosen, ratio = select_numpy(a, int(k[i]), selectors[i], ratios[i], not reuse)
            else:
                chosen, ratio = np.arange(0), np.float32(-1)
            parts += pack_numpy(v, chosen, int(k[i]), quantized[i])
            new_ratios.append(
                np.float32(-1) if quantized[i] and selectors[i] == "threshold" else ratio
            )
            v[chosen] = 0
            new_v.append(v.reshape(shape))
            if momentum:
                if masking:
                    u[chosen] = 0
                new_u.append(u.reshape(shape))
    message = np.concatenate([np.array([1], np.int32), *parts])
    if not finite:
        return np.zeros_like(message), new_v, new_u, np.array(ratios, np.float32)
    return message, new_v, new_u, np.array(new_ratios, np.float32)


def decode_numpy(messages, k, shapes, *, selectors, quantized) -> list[np.ndarray]:
    """Adds the messages int32 [P, W] rank by rank; returns one dense float32 array per shape."""
    totals = [np.zeros(int(np.prod(s)), np.float32) for s in shapes]
    for message in np.asarray(messages, np.int32):
        if message[0] == 0:
            continue
        at = 1
        for i, total in enumerate(totals):
            slots, count = int(k[i]), message[at]
            if quantized[i]:
                value = message[at + 1 : at + 2].view(np.float32)
                index = message[at + 2 : at + 2 + slots][:count]
                at += 2 + slots
            else:
                index = message[at + 1 : at + 1 + slots][:count]
                value = message[at + 1 + slots : at + 1 + 2 * slots][:count].view(np.float32)
                at += 1 + 2 * slots
            total[index] += value  # indices are unique within a rank
        if at != message.size:
            raise ValueError(f"`messages` must have {at} words. Received: {message.size}.")
    return [t.reshape(s) for t, s in zip(totals, shapes, strict=True)]


# ------------------------------------------------------------------------------ the whole algorithm


@dataclass(frozen=True)
class DenseWarmUp:
    """Dense exchange during the first `steps` steps."""

    steps: int


@dataclass(frozen=True)
class ExponentialWarmUp:
    """DGC's ramp: `steps` steps at each of `densities`, never below the final density."""

    steps: int
    densities: tuple = (0.25, 0.0625, 0.015625, 0.004, 0.001)


class RedSyncOracle:
    """`workers` workers over many steps, all in this process.

    Args:
        shapes: shapes of the variables, first layer first.
        workers: number of workers, P.
        density: fraction of the elements sent.
        selectors: per variable "dense" or one of `SELECTORS`; None dispatches by size in bytes.
        quantized: send one mean per variable instead of values.
        output_layer: index of the variable that is never quantized.
        clip_norm: local clipping: each worker's gradients, all variables together, are limited to a
            global norm of clip_norm / sqrt(P).
        warm_up: None, `DenseWarmUp` or `ExponentialWarmUp`.
        search_interval: steps between two searches of the threshold.

    Attributes:
        residuals, velocities: [worker][variable], None for dense variables (and without momentum).
        dense_velocities: [variable], None for the others.
        finite: whether the last step was; if not, all totals are zero and no state has changed.
    """

    def __init__(
        self, shapes, workers, density=0.001, *, momentum=0.0, nesterov=False, masking=True,
        quantized=False, clip_norm=None, warm_up=None, selectors=None, dense_below=131072,
        threshold_above=4194304, search_interval=5, output_layer=None,
    ):  # fmt: skip
        self.shapes = [tuple(s) for s in shapes]
        self.workers, self.density, self.momentum = workers, density, momentum
        self.nesterov, self.masking, self.clip_norm = nesterov, masking, clip_norm
        self.warm_up, self.search_interval = warm_up, search_interval
        sizes = [int(np.prod(s)) for s in self.shapes]
        if selectors is None:
            selectors = [
                "dense" if 4 * n < dense_below
                else "threshold" if 4 * n > threshold_above
                else "trimmed"
                for n in sizes
            ]  # fmt: skip
        self.selectors = list(selectors)
        self.sparse = [i for i, s in enumerate(self.selectors) if s != "dense"]
        self.dense = [i for i, s in enumerate(self.selectors) if s == "dense"]
        self.sizes = sizes
        self.quantized = [bool(quantized) and i != output_layer for i in range(len(sizes))]
        self.residuals = [self._zeros(self.sparse) for _ in range(workers)]
        self.velocities = [self._zeros(self.sparse if momentum else ()) for _ in range(workers)]
        self.dense_velocities = self._zeros(self.dense if momentum else ())
        self.ratios = [np.full(len(self.sparse), -1, np.float32) for _ in range(workers)]
        self.iteration, self.skipped, self.finite, self.messages = 0, 0, True, None

    def _zeros(self, which) -> list:
        return [np.zeros(s, np.float32) if i in which else None for i, s in enumerate(self.shapes)]

    def density_at(self, step: int) -> float:
        """Density of `step`."""
        if isinstance(self.warm_up, ExponentialWarmUp):
            stage = step // self.warm_up.steps
            if stage < len(self.warm_up.densities):
                return max(self.warm_up.densities[stage], self.density)
        return self.density

    def k_at(self, step: int) -> list[int]:
        """k of every sparse variable at `step`."""
        density = self.density_at(step)
        sizes = [self.sizes[i] for i in self.sparse]
        return [min(n, max(1, int(np.floor(density * n + 0.5)))) for n in sizes]

    def _clipped(self, grads) -> list[np.ndarray]:
        grads = [np.asarray(g, np.float32) for g in grads]
        if self.clip_norm is None:
            return grads
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads))
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.fmin(1.0, self.clip_norm * self.workers**-0.5 / norm)
            return [np.float32(np.nan if np.isnan(norm) else factor) * g for g in grads]

    def step(self, grads) -> list[np.ndarray]:
        """One step; `grads`: [worker][variable]. Returns the totals, sums over workers."""
        step, self.iteration = self.iteration, self.iteration + 1
        grads = [self._clipped(worker) for worker in grads]
        totals: list = [None] * len(self.shapes)
        dense_velocities = list(self.dense_velocities)
        for i in self.dense:
            total = self._sum([worker[i] for worker in grads])
            totals[i], dense_velocities[i] = self._momentum(total, dense_velocities[i])
        warm = isinstance(self.warm_up, DenseWarmUp) and step < self.warm_up.steps
        new = self._dense_round(grads, totals) if warm else self._sparse_round(grads, totals, step)
        self.finite = new is not None and all(np.isfinite(t).all() for t in totals)
        if not self.finite:
            self.skipped += 1
            return [np.zeros(s, np.float32) for s in self.shapes]
        self.dense_velocities = dense_velocities
        self.residuals, self.velocities, self.ratios = new
        return totals

    @staticmethod
    def _sum(arrays) -> np.ndarray:
        total = np.zeros_like(arrays[0])
        for array in arrays:
            total = total + array
        return total

    def _momentum(self, g, u) -> tuple:
        """The value to apply for gradient `g`, and the new velocity."""
        return accumulate_numpy(g, np.float32(0), u, self.momentum, self.nesterov, None)

    def _dense_round(self, grads, totals):
        """Warm-up: sums every worker's velocity; residuals are unchanged."""
        velocities = [list(v) for v in self.velocities]
        for i in self.sparse:
            sent = []
            for worker, v in zip(grads, velocities, strict=True):
                value, v[i] = self._momentum(worker[i], v[i])
                sent.append(value)
            totals[i] = self._sum(sent)
        return self.residuals, velocities, self.ratios

    def _sparse_round(self, grads, totals, step: int):
        """Select, all-gather, decode; None if a worker's message is flagged as non-finite."""
        if not self.sparse:
            return self.residuals, self.velocities, self.ratios
        k = self.k_at(step)
        names = {
            "selectors": [self.selectors[i] for i in self.sparse],
            "quantized": [self.quantized[i] for i in self.sparse],
        }
        residuals, velocities, ratios, messages = [], [], [], []
        for worker in range(self.workers):
            message, v, u, r = accumulate_and_select_numpy(
                [grads[worker][i] for i in self.sparse],
                [self.residuals[worker][i] for i in self.sparse],
                [self.velocities[worker][i] for i in self.sparse] if self.momentum else [],
                k, self.ratios[worker], **names,
                momentum=self.momentum, nesterov=self.nesterov, masking=self.masking,
                side=1 if step % 2 == 0 else -1, search=step % self.search_interval == 0,
            )  # fmt: skip
            messages.append(message)
            residuals.append(self._spread(v))
            velocities.append(self._spread(u))
            ratios.append(r)
        self.messages = np.stack(messages)
        if (self.messages[:, 0] == 0).any():
            for i in self.sparse:
                totals[i] = np.zeros(self.shapes[i], np.float32)
            return None
        shapes = [self.shapes[i] for i in self.sparse]
        decoded = decode_numpy(self.messages, k, shapes, **names)
        for i, total in zip(self.sparse, decoded, strict=True):
            totals[i] = total
        return residuals, velocities, ratios

    def _spread(self, values) -> list:
        """Values of the sparse variables in the order of all variables."""
        out: list = [None] * len(self.shapes)
        for i, value in zip(self.sparse, values, strict=False):
            out[i] = value
        return out
