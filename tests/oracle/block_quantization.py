"""Block quantization in plain numpy: nearest levels by search, a loop over blocks.

Levels are chosen in float64. Values, sums and errors are float32, as on the workers.
"""

import numpy as np

# 4 bits are floats (-1)^s 2^(e - 1) 1.m or, for e = 0, (-1)^s 0.m, with bits s e e m; in halves.
E2M1 = [
    (-1) ** (c >> 3) * ((2 + (c & 1)) * 2 ** ((c >> 1 & 3) - 1) if c & 6 else c & 1)
    for c in range(16)
]
LEVELS = {8: np.arange(-127, 128), 4: np.unique(E2M1), 2: np.arange(-1, 2)}


def scale_as_sent(scale):
    """The smallest bfloat16 not below a scale, by truncation and one step up; 0 if it is tiny."""
    cut = np.frombuffer(np.uint32(np.float32(scale).view(np.uint32) >> 16 << 16).tobytes(), "f4")[0]
    if cut < scale:
        cut = np.uint32(cut.view(np.uint32) + 0x10000).view(np.float32)
    return np.float32(0) if cut < 2.0**-100 else cut


def nearest(block, scale, bits):
    """The nearest level of each element, by comparison with all levels in float64."""
    if scale == 0:
        return np.zeros(len(block), np.int64)
    values = LEVELS[bits] * (np.float64(scale) / LEVELS[bits][-1])
    return LEVELS[bits][np.abs(np.asarray(block, np.float64)[:, None] - values).argmin(axis=1)]


def block_scale(block, bits):
    """The scale of a block: from the largest magnitude or, with 2 bits, of the smallest error."""
    largest = np.abs(block).max()
    if bits > 2:
        return scale_as_sent(largest)
    scales = [scale_as_sent(np.float32(s) * largest) for s in (1.0, 0.8, 0.6, 0.45)]
    lost = [
        np.square(np.float64(block) - nearest(block, s, 2) * np.float64(s)).sum() for s in scales
    ]
    return scales[int(np.argmin(lost))]


def quantized(row, bits, block):
    """Levels and scales of a row, and its decoded values, float32."""
    codes, scales, values = [], [], []
    for begin in range(0, len(row), block):
        part = row[begin : begin + block]
        scale = block_scale(part, bits)
        code = nearest(part, scale, bits)
        codes.append(code)
        scales.append(scale)
        values.append(np.float32(code) * (scale / np.float32(LEVELS[bits][-1])))
    return np.concatenate(codes), np.array(scales, np.float32), np.concatenate(values)


def message_parts(message, size, bits, block):
    """Flag, levels and scales of a message, read bit by bit."""
    blocks = -(-size // block)
    halves = np.ascontiguousarray(message[1 : 1 + -(-blocks // 2)]).view(np.uint16)[:blocks]
    scales = (halves.astype(np.uint32) << 16).view(np.float32)
    words = message[1 + -(-blocks // 2) :].view(np.uint32)
    first = np.arange(size) * bits  # number of the code's first bit
    codes = (words[first // 32] >> (first % 32)).astype(np.int64) & (2**bits - 1)
    integers = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    return message[0], np.array(E2M1)[codes] if bits == 4 else integers, scales


class BlockOracle:
    """Dense sums with error feedback in both phases; all tensors of a step are one vector.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers. Two of them exchange whole vectors.
        bits: Bits of a code.
        block: Elements that share a scale.
    """

    def __init__(self, shapes, workers: int, bits: int, block: int):
        self.shapes, self.bits, self.block = list(shapes), bits, block
        self.sizes = [int(np.prod(s)) for s in shapes]
        self.vectors = [np.zeros(sum(self.sizes), np.float32) for _ in range(workers)]

    @property
    def residuals(self):
        return [self._tensors(v) for v in self.vectors]

    def follow(self, states) -> None:
        """Continues from the state of float32 workers, where near ties round differently."""
        self.vectors = [np.concatenate([np.ravel(e) for e in s["residual"]]) for s in states]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        sums = [
            e + np.concatenate([np.ravel(g) for g in own])
            for e, own in zip(self.vectors, grads, strict=True)
        ]
        workers = len(grads)
        parts = 1 if workers == 2 else workers
        size = sums[0].size
        length = -(-size // (32 * parts)) * 32
        padded = [np.pad(p, (0, parts * length - size)).reshape(parts, length) for p in sums]
        sent = [np.stack([self._sent(part) for part in p]) for p in padded]
        errors = [p - q for p, q in zip(padded, sent, strict=True)]
        total = sum(sent)
        if parts > 1:
            for owner in range(workers):
                exact = total[owner] + errors[owner][owner]  # a worker has its own block exactly
                total[owner] = self._sent(exact)
                errors[owner][owner] = exact - total[owner]
        self.vectors = [e.ravel()[:size] for e in errors]
        return self._tensors(total.ravel()[:size])

    def _sent(self, row):
        return quantized(row, self.bits, self.block)[2]

    def _tensors(self, vector):
        parts = np.split(vector, np.cumsum(self.sizes)[:-1])
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]
