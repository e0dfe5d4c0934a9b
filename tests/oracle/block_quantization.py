"""Block quantisation in plain numpy: nearest levels by search, a loop over blocks."""

import numpy as np

LEVELS = {bits: np.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)) for bits in (8, 4, 2)}


def scale_as_sent(scale):
    """The smallest bfloat16 not below a scale, by truncation and a step up; 0 if it is tiny."""
    cut = np.frombuffer(np.uint32(np.float32(scale).view(np.uint32) >> 16 << 16).tobytes(), "f4")[0]
    if cut < scale:
        cut = np.uint32(cut.view(np.uint32) + 0x10000).view(np.float32)
    return np.float32(0) if cut < 2.0**-100 else cut


def nearest(block, scale, bits):
    """The level next to each element, by comparing all of them in float64."""
    if scale == 0:
        return np.zeros(len(block), np.int64)
    values = LEVELS[bits] * (np.float64(scale) / LEVELS[bits][-1])
    return LEVELS[bits][np.abs(np.float64(block)[:, None] - values).argmin(axis=1)]


def block_scale(block, bits):
    """The scale of a block: of the largest magnitude, or, with 2 bits, of the least error."""
    largest = np.abs(block).max()
    if bits > 2:
        return scale_as_sent(largest)
    scales = [scale_as_sent(np.float32(s) * largest) for s in (1.0, 0.8, 0.6, 0.45)]
    lost = [
        np.square(np.float64(block) - nearest(block, s, 2) * np.float64(s)).sum() for s in scales
    ]
    return scales[int(np.argmin(lost))]


def quantized(row, bits, block):
    """Codes and scales of a row, and its decoded values, float64."""
    codes, scales, values = [], [], []
    for begin in range(0, len(row), block):
        part = row[begin : begin + block]
        scale = block_scale(part, bits)
        code = nearest(part, scale, bits)
        codes.append(code)
        scales.append(scale)
        values.append(code * (np.float64(scale) / LEVELS[bits][-1]))
    return np.concatenate(codes), np.array(scales, np.float32), np.concatenate(values)


def message_parts(message, size, bits, block):
    """Flag, codes and scales of a message, read bit by bit."""
    blocks = -(-size // block)
    halves = np.ascontiguousarray(message[1 : 1 + -(-blocks // 2)]).view(np.uint16)[:blocks]
    scales = (halves.astype(np.uint32) << 16).view(np.float32)
    words = message[1 + -(-blocks // 2) :].view(np.uint32)
    codes = []
    for i in range(size):
        code = int(words[i * bits // 32]) >> (i * bits % 32) & (2**bits - 1)
        codes.append(code - 2**bits if code >= 2 ** (bits - 1) else code)
    return message[0], np.array(codes), scales
