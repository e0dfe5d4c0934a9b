"""LGC in plain numpy, float64: the autoencoder by loops over taps, top-k, and the third stage.

Reference: Abrahamyan, Chen, Bekoulis, Deligiannis (2021), "Learned Gradient Compression for
Distributed Deep Learning", IEEE TNNLS.
"""

from __future__ import annotations

import numpy as np

from tests.oracle.redsync import top_k_numpy
from tests.oracle.sparse import count

SLOPE = 0.2


def leaky(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, SLOPE * x)


def convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """`[n, a]` by `[3, a, b]`, stride 2: `[n / 2, b]`."""
    result = np.zeros((len(x) // 2, kernel.shape[2]))
    for t in range(len(result)):
        for j in range(3):
            if 2 * t + j < len(x):
                result[t] += x[2 * t + j] @ kernel[j]
    return result


def transposed_convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """`[n, a]` by `[a, 3, b]`, stride 2: `[2 n, b]`."""
    result = np.zeros((2 * len(x) + 1, kernel.shape[2]))
    for t in range(len(x)):
        for j in range(3):
            result[2 * t + j] += x[t] @ kernel[:, j]
    return result[:-1]


class Network:
    """The autoencoder; `parameters` lists each layer's kernel and bias in order."""

    def __init__(self, parameters, channels, decoder_channels, code_channels, innovation: bool):
        rest = np.float64(parameters)
        self.encoder, self.decoder, self.stride = [], [], 2 ** len(channels)

        def take(*shape):
            nonlocal rest
            size = int(np.prod(shape))
            taken, rest = rest[:size].reshape(shape), rest[size:]
            return taken

        for a, b in zip((1, *channels), channels, strict=False):
            self.encoder.append((take(3, a, b), take(b)))
        self.to_code = take(channels[-1], code_channels), take(code_channels)
        for a, b in zip((code_channels, *decoder_channels), decoder_channels, strict=False):
            self.decoder.append((take(a, 3, b), take(b)))
        width = decoder_channels[-1]
        self.last = take(width, 1), take(1, 1) if innovation else np.zeros((1, 1)), take(1)
        assert rest.size == 0

    def encode(self, vector: np.ndarray) -> np.ndarray:
        x = vector[:, None]
        for kernel, bias in self.encoder:
            x = leaky(convolution(x, kernel) + bias)
        return x @ self.to_code[0] + self.to_code[1]

    def decode(self, code: np.ndarray, innovation: np.ndarray | float = 0.0) -> np.ndarray:
        for kernel, bias in self.decoder:
            code = leaky(transposed_convolution(code, kernel) + bias)
        kernel, weight, bias = self.last
        return (code @ kernel + bias)[:, 0] + weight[0, 0] * innovation


def normalised(x: np.ndarray) -> tuple[np.ndarray, float]:
    scale = np.sqrt(np.mean(x**2))
    return (x / scale if scale else x), scale


class LGCOracle:
    """Workers in the third stage; worker `step mod workers` leads.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        network: The autoencoder.
        density: Fraction of each tensor's elements that the leader selects.
        innovation: Number of elements of an innovation; `None` averages codes instead.
    """

    def __init__(self, shapes, workers, network: Network, density: float, innovation: int | None):
        self.shapes, self.network, self.innovation = list(shapes), network, innovation
        self.sizes = [int(np.prod(s)) for s in shapes]
        self.density, self.iteration = density, 0
        self.residuals = [[np.zeros(s) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        sums = [
            np.concatenate([(np.float32(v) + g).reshape(-1) for v, g in zip(old, new, strict=True)])
            for old, new in zip(self.residuals, grads, strict=True)
        ]
        leader = self.iteration % len(sums)
        slots = self._largest(sums[leader])
        used = np.flatnonzero(slots >= 0)
        at = slots[used]
        length = self.network.stride * max(1, -(-len(slots) // self.network.stride))
        values = [np.zeros(length) for _ in sums]
        for value, own in zip(values, sums, strict=True):
            value[used] = own[at]
        vectors = [normalised(v) for v in values]
        codes = [self.network.encode(x) for x, _ in vectors]
        if self.innovation is None:
            scales = [scale for _, scale in vectors]
            mean = sum(s * c for s, c in zip(scales, codes, strict=True)) / (sum(scales) or 1.0)
            decoded = [self.network.decode(mean)] * len(sums)
        else:
            decoded = [self.network.decode(codes[leader], self._innovation(x)) for x, _ in vectors]
        total, kept = np.zeros(sum(self.sizes)), [np.float64(s) for s in sums]
        for own, v, q in zip(kept, values, decoded, strict=True):
            q, v = q[used], v[used]
            delivered = q @ v / (q @ q) * q if q @ q else q
            total[at] += delivered
            own[at] -= delivered
        self.residuals = [self._tensors(own) for own in kept]
        self.iteration += 1
        return self._tensors(total)

    def follow(self, states) -> None:
        """Continues from the state of float32 workers, where near ties select other elements."""
        self.residuals = [[np.float32(v) for v in s["residual"]] for s in states]

    def _largest(self, vector: np.ndarray) -> np.ndarray:
        """Slots for the positions of every tensor; unused slots are -1."""
        found, start = [], 0
        for size in self.sizes:
            k = count(self.density, size)
            own = top_k_numpy(np.abs(vector[start : start + size]), k)
            found.append(np.pad(start + own, (0, k - len(own)), constant_values=-1))
            start += size
        return np.concatenate(found).astype(np.int64)

    def _innovation(self, x: np.ndarray) -> np.ndarray:
        at = np.argsort(-np.abs(x), kind="stable")[: self.innovation]
        result = np.zeros_like(x)
        result[at] = x[at]
        return result

    def _tensors(self, vector: np.ndarray) -> list[np.ndarray]:
        parts = np.split(vector, np.cumsum(self.sizes)[:-1])
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]
