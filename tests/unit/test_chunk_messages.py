"""Messages of chunks: sums and sender counts, two-bit values, and their size by the formula."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.oracle.chunks import chunked_top_k_numpy
from tf_redsync.methods.common import two_bit_values
from tf_redsync.methods.common.chunk_messages import ChunkMessages
from tf_redsync.methods.common.chunking import Chunks
from tf_redsync.ops import wire
from tf_redsync.ops.selection import chunked_top_k

SHAPES = ((128, 64), (67, 32), (0, 3), (50,), ())
CHUNKS = tuple(map(Chunks.of, SHAPES))
TRUE = tf.constant(True)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("f4")


def two_bits_numpy(values):
    """Returns the two-bit values of `[number, k]` in float64. Chunks of zeros have no level."""
    values = np.float64(values)
    scales = np.abs(values).mean(axis=1, keepdims=True)
    units = np.abs(values) / np.where(scales > 0, scales, 1)
    small, large = (units < 1) & (scales > 0), units >= 1
    for chosen in (small, large):
        units[chosen] = units[chosen].mean() if chosen.any() else 0.0
    return np.where(values < 0, -1, 1) * units * scales


def round_trip(values, numbers=None):
    """Returns two-bit values of chunks of one tensor, or of tensors with `numbers` of chunks."""
    numbers = [len(values)] if numbers is None else numbers
    return two_bit_values.decode(two_bit_values.encode(values, numbers), numbers)


def encode_workers(form, workers):
    """Returns the messages of some workers, and their values as dense chunks of each group."""
    messages, dense = [], []
    for worker in range(workers):
        flat = [tf.constant(normal(g.number, g.size, seed=worker)) for g in form.groups]
        chosen = [chunked_top_k(f, form.k(g)) for g, f in zip(form.groups, flat, strict=True)]
        message, delivered = form.message(TRUE, *zip(*chosen, strict=True))
        messages.append(message)
        pairs = zip(form.groups, chosen, delivered, strict=True)
        dense.append([form.scattered(g, at, v).numpy() for g, (at, _), v in pairs])
    return tf.stack(messages), dense


@pytest.mark.parametrize("bits", [32, 2])
def test_sums_and_sender_counts(bits):
    form = ChunkMessages(CHUNKS, 5, bits)
    messages, dense = encode_workers(form, 3)
    sums, senders = form.sums(messages)
    for i, group in enumerate(form.groups):
        rows = [own[i] for own in dense]
        np.testing.assert_array_equal(sums[i], (rows[0] + rows[1]) + rows[2])
        np.testing.assert_array_equal(senders[i], sum((r != 0).astype("f4") for r in rows))
        assert sums[i].shape == (group.number, group.size)
        if bits == 32:
            flat = normal(group.number, group.size)
            positions, values = chunked_top_k_numpy(flat, form.k(group))
            expected = np.zeros_like(flat)
            np.put_along_axis(expected, positions.astype(np.int64), values, axis=1)
            np.testing.assert_array_equal(rows[0], expected)


def test_graph_has_few_constants_per_chunk():
    """A vector of prime length has a chunk for each element."""
    form = ChunkMessages((Chunks.of((10007,)),), 1, 2)

    @tf.function(autograph=False)
    def message(positions, values):
        return form.message(TRUE, [positions], [values])

    specs = [tf.TensorSpec([10007, 1], dtype) for dtype in (tf.int32, tf.float32)]
    graph = message.get_concrete_function(*specs).graph.as_graph_def()
    assert graph.ByteSize() < 3 * 8 * 10007  # one to encode, one to decode


@pytest.mark.parametrize("k", [32, 64, 128])
def test_message_bits(k):
    """A position among 4096 elements takes 12 bits, a value 32, or 2 and a scale per chunk."""
    number, tensors = 256, [Chunks.of((1024, 1024))]
    for bits, count in ((32, number * k * 44), (2, number * (k * 14 + 32) + 64)):
        form = ChunkMessages(tuple(tensors), k, bits)
        messages, _ = encode_workers(form, 1)
        assert 32 * messages.shape[1] == 32 + count == 8 * form.payload
    assert 32 * 2**20 / (32 + count) > {32: 200, 64: 130, 128: 70}[k]  # times smaller than dense


@pytest.mark.parametrize("bits", [32, 2])
def test_payload_sizes_of_odd_tensors(bits):
    """Each part takes whole words; an empty tensor takes only its levels."""
    form, total = ChunkMessages(CHUNKS, 5, bits), 32
    sizes = {(64, 64): 2, (1, 32): 67, (1, 3): 0, (1, 50): 1, (1, 1): 1}  # sides: chunks
    for sides, number in sizes.items():
        k, size = min(5, math.prod(sides)), math.prod(sides)
        total += 32 * math.ceil(number * k * math.ceil(math.log2(size)) / 32)
        if bits == 32:
            total += 32 * number * k
        else:
            total += 32 * math.ceil(2 * number * k / 32) + 32 * number + 64
    messages, _ = encode_workers(form, 1)
    assert 8 * form.payload == 32 * messages.shape[1] == total


def test_each_tensor_has_its_levels():
    values = normal(9, 40) * np.float32([1, 100, 1])[[0, 0, 0, 0, 1, 1, 2, 2, 2], None] ** 2
    values[4:6, :20] *= 100
    found = round_trip(values, [4, 0, 2, 3])
    parts = [values[:4], values[4:6], values[6:]]
    expected = np.concatenate(list(map(two_bits_numpy, parts)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(round_trip(values) - expected).max() > 1.0  # one tensor


def test_groups_have_equal_sides_and_keep_the_tensors():
    shapes = ((64, 64), (3, 5), (128, 64), (), (7,), (5,), (3, 5), (0, 5))
    form = ChunkMessages(tuple(map(Chunks.of, shapes)), 5)
    assert [(g.sides, g.tensors, g.numbers) for g in form.groups] == [
        ((64, 64), (0, 2), [1, 2]),
        ((3, 5), (1, 6), [1, 1]),
        ((1, 1), (3,), [1]),
        ((1, 7), (4,), [1]),
        ((1, 5), (5, 7), [1, 0]),
    ]
    tensors = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    for found, tensor in zip(form.join(form.split(tensors)), tensors, strict=True):
        np.testing.assert_array_equal(found, tensor)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_two_bits_encode_sign_and_class_mean(scale):
    values = normal(6, 40) * np.float32(scale) * np.float32(10.0) ** np.arange(6)[:, None]
    values = np.float32(values)
    values[2] = 0
    found = round_trip(tf.constant(values))
    np.testing.assert_allclose(found, two_bits_numpy(values), rtol=1e-5)
    assert np.abs(found[2]).max() == 0
    assert (np.sign(found) == np.sign(values)).all()


def test_chunks_of_zeros_do_not_change_others():
    values = normal(4, 64)
    alone = round_trip(tf.constant(values))
    padded = tf.concat([values, tf.zeros([60, 64])], axis=0)
    found = round_trip(padded)
    np.testing.assert_allclose(found[:4], alone, rtol=1e-6)
    np.testing.assert_allclose(np.abs(found[:4]).mean(), np.abs(values).mean(), rtol=0.01)
    assert np.abs(found[4:]).max() == 0


def test_two_distinct_values_are_exact():
    values = np.float32([[1, -3, 1, 3], [2, 6, -2, -6]])
    found = round_trip(tf.constant(values))
    np.testing.assert_allclose(found, values, rtol=1e-6)


def test_two_bits_keep_most_of_the_selected_energy():
    flat = normal(64, 4096)
    _, values = chunked_top_k(flat, 64)
    found = round_trip(values)
    error = np.square(found - values).sum() / np.square(values).sum()
    assert error < 0.01
    ones = np.sign(values) * np.abs(values).mean(axis=1, keepdims=True)
    assert error < 0.6 * np.square(ones - values).sum() / np.square(values).sum()  # one bit


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_nonfinite_scale_invalidates_the_message(bad):
    values = np.full((1, 4), bad, np.float32)
    form = ChunkMessages((Chunks.of((64, 64)),), 4, 2)
    positions = tf.constant([[0, 1, 2, 3]])
    message, _ = form.message(TRUE, [positions], [tf.constant(values)])
    assert not np.any(message) and message.shape[0] * wire.BYTES_PER_WORD == form.payload
    sums, senders = form.sums(message[tf.newaxis])
    assert not np.any(sums[0]) and not np.any(senders[0])
