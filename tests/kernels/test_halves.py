"""Rounding to 16 bits: native, TensorFlow's casts and numpy's."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import assert_same_bits, needs_native, on
from tf_redsync.ops import halves, rows

DTYPES = (tf.float16, tf.bfloat16)
BACKENDS = ("native", "tensorflow")


def rounded(x, dtype):
    """Returns the nearest 16-bit numbers, half to even, as float32."""
    if dtype == tf.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    up = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return up.astype(np.uint32).view(np.float32)


def message_words(x, dtype):
    """Returns a flag, then two numbers per word, the first in the low half."""
    value = rounded(x, dtype)
    if dtype == tf.float16:
        codes = value.astype(np.float16).view(np.uint16)
    else:
        codes = (value.view(np.uint32) >> 16).astype(np.uint16)
    flags = np.ones([len(x), 1], np.int32)
    return np.concatenate([flags, np.ascontiguousarray(codes).view(np.int32)], axis=1)


def values(*shape, seed=0):
    """Returns values of many magnitudes, including float16's smallest ones and ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 8, shape)
    ties = (2 * rng.integers(0, 2**10, shape) + 1) * 2.0**-25  # between the smallest ones
    return np.where(rng.random(shape) < 0.1, ties, x).astype(np.float32)


def in_blocks(tensors, blocks):
    """Returns all elements in rows of equal even length, padded with zeros."""
    vector = np.concatenate([np.ravel(t) for t in tensors])
    length = 2 * -(-vector.size // (2 * blocks))
    return np.append(vector, np.zeros(blocks * length - vector.size, "f4")).reshape(blocks, length)


def in_shapes(table, like):
    """Returns the first elements of the rows."""
    parts = np.split(
        np.ravel(table)[: sum(t.size for t in like)], np.cumsum([t.size for t in like])
    )
    return [p.reshape(t.shape) for p, t in zip(parts, like, strict=False)]


def encoded(backend, tensors, dtype, residuals=(), blocks=1):
    given = [tf.constant(t) for t in tensors]
    rest = [tf.constant(r) for r in residuals]
    return on(backend, lambda: halves.half_encode(given, rest, blocks, dtype))


SHAPES = [[(2,)], [(1,)], [(5,), (3, 3), (0,), (1,)], [(33, 1001), (7,), (70_001,)]]


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_messages_errors_and_sums(backend, dtype, shapes, blocks):
    """A whole round: every worker encodes, sums its block, and decodes all of them."""
    x = [[values(*s, seed=10 * w + i) for i, s in enumerate(shapes)] for w in range(blocks)]
    rest = [[values(*s, seed=99 - 10 * w - i) for i, s in enumerate(shapes)] for w in range(blocks)]
    messages, errors = [], []
    for worker in range(blocks):
        sums = [v + r for v, r in zip(x[worker], rest[worker], strict=True)]
        table = in_blocks(sums, blocks)
        message, error = encoded(backend, x[worker], dtype, rest[worker], blocks)
        assert_same_bits(message, message_words(table, dtype), "message")
        assert_same_bits(error, in_shapes(table - rounded(table, dtype), sums), "errors")
        messages.append(message)
        errors.append(error)
    results = []
    for block in range(blocks):
        received = np.stack([m[block] for m in messages])
        table = in_blocks(errors[block], blocks)
        total = np.zeros_like(table[block])
        for worker in range(blocks):
            decoded = received[worker, 1:].view(np.uint16)
            total = total + value_of(decoded, dtype)
        total = total + table[block]
        table[block] = total - rounded(total, dtype)
        given = [tf.constant(e) for e in errors[block]]
        sent = tf.constant(received)
        result = on(backend, lambda: halves.half_reduce(sent, given, block, dtype))  # noqa: B023
        assert_same_bits(result[0], message_words(total[None], dtype)[0], "message of the sum")
        assert_same_bits(result[1], in_shapes(table, x[0]), "errors of the sum")
        results.append(result[0])
    like = [tf.constant(t) for t in x[0]]
    decoded = on(backend, lambda: halves.half_decode(tf.constant(np.stack(results)), like, dtype))
    whole = np.stack([value_of(r[1:].view(np.uint16), dtype) for r in results])
    assert_same_bits(decoded, in_shapes(whole, x[0]), "totals")


def value_of(codes, dtype):
    """Returns the float32 values of 16-bit codes."""
    if dtype == tf.float16:
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


@needs_native
def test_every_float16_and_its_neighbors():
    codes = np.arange(2**16, dtype=np.uint16)
    exact = codes.view(np.float16).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    middles = (exact[:-1] + exact[1:]) / 2
    near = [np.nextafter(middles, np.float32(s * np.inf), dtype=np.float32) for s in (-1, 1)]
    x = np.concatenate([exact, middles, *near])
    x = x[np.abs(x) < 65520]
    x = x[: x.size // 2 * 2]
    message, errors = encoded("native", [x], tf.float16)
    assert_same_bits(message, message_words(x[None], tf.float16), "message")
    assert_same_bits(errors, [x - rounded(x, tf.float16)], "errors")
    sent, like = tf.constant(message), [tf.constant(x)]
    back = on("native", lambda: halves.half_decode(sent, like, tf.float16))
    assert_same_bits(back, [rounded(x, tf.float16)], "back")


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (tf.float16, 65520.0), (tf.float16, -1e6), (tf.float16, np.nan), (tf.float16, -np.inf),
        (tf.bfloat16, 3.4e38), (tf.bfloat16, np.inf), (tf.bfloat16, -np.nan),
    ],
)  # fmt: skip
def test_nonfinite_values_invalidate_the_message(backend, dtype, bad):
    x = values(141)
    x[139] = bad
    assert not encoded(backend, [x], dtype, blocks=2)[0].any()
    assert not encoded(backend, [np.zeros(141, "f4")], dtype, [x], blocks=2)[0].any()
    x[139] = 65519.0
    assert encoded(backend, [x], dtype, blocks=2)[0][:, 0].tolist() == [1, 1]


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_overflowing_sum_invalidates_the_message(backend):
    for large, sent in ((4e4, False), (3e4, True)):
        messages, errors = encoded(backend, [np.float32([1, large, 3, 4, 5, 6])], tf.float16, (), 2)
        received, rest = tf.stack([messages[0]] * 2), [tf.constant(e) for e in errors]
        reduce = functools.partial(halves.half_reduce, received, rest, 0, tf.float16)
        assert on(backend, reduce)[0].any() == sent


@needs_native
def test_nan_with_any_bits_invalidates_the_message():
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000):
        x = np.array([bits, 0], np.uint32).view(np.float32)
        for dtype in DTYPES:
            assert not encoded("native", [x], dtype)[0].any(), (hex(bits), dtype)


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_lengths(backend):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([2, None])])
    def round_trip(vector, matrix):
        both_of = [vector, matrix]
        messages, errors = halves.half_encode(both_of, both_of, 2, tf.float16)
        rows = tf.unstack(messages)
        sums = [halves.half_reduce(tf.stack([m, m]), errors, 0, tf.float16)[0] for m in rows]
        return halves.half_decode(tf.stack(sums), both_of, tf.float16)

    vector, matrix = on(backend, lambda: round_trip(tf.ones([3]), tf.ones([2, 2])))
    assert vector.tolist() == [4.0] * 3 and matrix.tolist() == [[4.0] * 2] * 2


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("workers", [2, 5])
def test_graph_sums_in_order(backend, known, workers):
    """Grappler does not regroup the sum, for static and dynamic numbers of messages."""
    x, error = values(workers, 500), values(500, seed=1)
    message = [encoded("native", [row], tf.bfloat16)[0][0] for row in x]
    count = workers if known else None
    spec = [tf.TensorSpec([count, 251], tf.int32), tf.TensorSpec([count, 500], tf.float32)]

    @tf.function(input_signature=spec)
    def reduce(messages, rest):
        first = halves.half_reduce(messages, [rest], 0, tf.bfloat16)
        return (*first, halves.half_decode(messages, [rest], tf.bfloat16))

    rest = np.concatenate([error[None], np.zeros([workers - 1, 500], "f4")])
    got, errors, back = on(backend, lambda: reduce(np.stack(message), rest))
    total = functools.reduce(np.add, rounded(x, tf.bfloat16)) + error
    assert_same_bits(got, message_words(total[None], tf.bfloat16)[0], "message")
    assert_same_bits(errors[0][0], total - rounded(total, tf.bfloat16), "errors")
    assert_same_bits(back, [rounded(x, tf.bfloat16)], "decoded")


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("known", [True, False])
def test_empty_vectors(backend, blocks, known):
    @tf.function(input_signature=[tf.TensorSpec([0, 2] if known else [None, None], tf.float32)])
    def round_trip(empty):
        messages, errors = halves.half_encode([empty], [empty], blocks, tf.float16)
        message, errors = halves.half_reduce(messages, errors, blocks - 1, tf.float16)
        return message, errors, halves.half_decode(messages, errors, tf.float16)

    message, errors, back = on(backend, lambda: round_trip(tf.zeros([0, 2])))
    assert message.tolist() == [1] and [t.shape for t in (*errors, *back)] == [(0, 2)] * 2


@pytest.mark.parametrize("sizes", [[2**31 + 2], [2**30 + 2] * 2], ids=str)
def test_rows_beyond_int32_elements(sizes):
    specs = [tf.TensorSpec([n], tf.float32) for n in sizes]

    @tf.function(input_signature=[tf.TensorSpec([2, 2**30 + 64]), specs])
    def cut(table, like):
        return rows.to_tensors(table, like)

    graph = cut.get_concrete_function().graph
    (split,) = (op for op in graph.get_operations() if op.type == "SplitV")
    assert split.inputs[0].shape == [sum(sizes)]
    assert tf.get_static_value(split.inputs[1]).tolist() == sizes


@needs_native
def test_static_shapes_are_inferred():
    @tf.function
    def shapes():
        messages, errors = halves.half_encode([tf.ones([3, 3])], [], 2, tf.float16)
        message, _ = halves.half_reduce(messages, errors, 1, tf.float16)
        (back,) = halves.half_decode(messages, errors, tf.float16)
        found.extend([messages.shape, errors[0].shape, message.shape, back.shape])

    found = []
    on("native", shapes)
    assert found == [(2, 4), (3, 3), (4,), (3, 3)]


@needs_native
def test_inputs_of_wrong_shapes():
    ones = [tf.ones([3])]
    messages = tf.ones([2, 2], tf.int32)
    for wrong in (
        lambda: halves.half_encode(ones, [tf.ones([2])], 1, tf.float16),
        lambda: halves.half_encode([*ones, *ones], ones, 1, tf.float16),
        lambda: halves.half_reduce(tf.ones([2, 3], tf.int32), ones, 0, tf.float16),
        lambda: halves.half_reduce(messages, ones, 2, tf.float16),
        lambda: halves.half_reduce(messages, ones, -1, tf.float16),
        lambda: halves.half_decode(tf.ones([2, 3], tf.int32), ones, tf.float16),
        lambda: halves.half_decode(tf.ones([2], tf.int32), ones, tf.float16),
    ):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            on("native", wrong)


@needs_native
def test_constants_and_variables_are_not_overwritten():
    """An op writes its errors into an input only if no other op needs it."""
    residual = tf.Variable(values(1000))
    before = residual.numpy()

    @tf.function
    def step(x):
        messages, errors = halves.half_encode([x], [residual.read_value()], 1, tf.bfloat16)
        _, (new,) = halves.half_reduce(messages, errors, 0, tf.bfloat16)
        return errors[0], new, x

    given = tf.constant(values(1000, seed=1))
    kept = given.numpy()
    error, new, returned = on("native", lambda: step(given))
    assert_same_bits([residual.numpy(), given.numpy(), returned], [before, kept, kept], "inputs")
    sums = kept + before
    assert_same_bits(error, sums - rounded(sums, tf.bfloat16), "errors, which two ops need")
    assert new.any()
