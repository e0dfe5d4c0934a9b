"""Packed bits and Rice codes: native, reference and oracle give equal words."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import assert_same_bits, both, needs_native, on
from tests.loops import loop
from tests.oracle.bits import (
    bitmap_numpy,
    pack_numpy,
    rice_decode_numpy,
    rice_encode_numpy,
    set_bits_numpy,
    unpack_numpy,
    write_numpy,
)
from tf_redsync import ops
from tf_redsync.ops import bits, native
from tf_redsync.ops.codecs import rice_decode, rice_encode

BACKENDS = [pytest.param("native", marks=needs_native), "tensorflow"]
COUNTS = (0, 1, 31, 32, 33, 100)
BLOCKS = 40_000  # number of codes; the last exceeds one thread's share
INT32 = np.iinfo(np.int32)


def random_words(shape, seed: int = 0) -> np.ndarray:
    """Returns words of random bits."""
    return np.random.default_rng(seed).integers(INT32.min, INT32.max + 1, shape).astype(np.int32)


def assert_rejected(backend, run, *names: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        on(backend, run)
    assert all(name in str(caught.value) for name in names), caught.value


# ------------------------------------------------------------------- codes of a fixed length


@needs_native
@loop("width", [0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 32])
@loop("rows", [(), (0,), (1,), (3,), (2, 2)])
def test_codes_of_every_width(width, rows):
    """High bits of the codes are ignored."""
    for count in COUNTS:
        codes = random_words((*rows, count), width)
        expected = pack_numpy(codes, width)
        assert expected.shape[-1] == bits.packed_words(count, width)
        for backend, got in both(lambda: bits.packed(codes, width)).items():  # noqa: B023
            assert_same_bits(got, expected, f"{backend} {count}")
        if len(rows) == 1:
            words = random_words(expected.shape, count)  # the unused bits of the last word as well
            again = unpack_numpy(words, width, count)
            for backend, got in both(lambda: bits.unpacked(words, width, count)).items():  # noqa: B023
                assert_same_bits(got, again, f"{backend} {count}")
            mask = np.uint32(2**width - 1)
            back = on("native", lambda: bits.unpacked(expected, width, count))  # noqa: B023
            np.testing.assert_array_equal(back.view(np.uint32), codes.view(np.uint32) & mask)


@needs_native
@pytest.mark.parametrize("width", [1, 7, 32])
def test_several_blocks(width):
    codes = random_words((2, BLOCKS), width)
    words = pack_numpy(codes, width)
    expected = unpack_numpy(words, width, BLOCKS)
    for backend in ("native", "tensorflow"):
        assert_same_bits(on(backend, lambda: bits.packed(codes, width)), words, backend)
        got = on(backend, lambda: bits.unpacked(words, width, BLOCKS))
        assert_same_bits(got, expected, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_number_of_words(backend):
    for words in (0, 2, 4):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="words|equal"):
            on(backend, lambda: bits.unpacked(np.zeros([2, words], np.int32), 9, 10))  # noqa: B023
    for words in (0, 3, 5):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="codes|equal"):
            codes = np.zeros([2, words], np.int32)
            on(backend, lambda: rice_decode(codes, rice=3, bitmap_words=2, count=20))  # noqa: B023


# ------------------------------------------------------------------ codes of varying lengths


@needs_native
def test_codes_of_varying_lengths():
    rng = np.random.default_rng(0)
    for count in COUNTS:
        codes = rng.integers(-(2**63), 2**63, count)  # only low bits are used
        lengths = rng.integers(0, 33, count).astype(np.int32)
        full = -(-int(lengths.sum()) // 32)
        for words in {0, 1, full // 2, full, full + 3}:
            expected = write_numpy(codes, lengths, words)
            for backend, got in both(lambda: bits.written(codes, lengths, words)).items():  # noqa: B023
                assert_same_bits(got, expected, f"{backend} {count} {words}")


@needs_native
def test_written_codes_are_read_back():
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 33, 200).astype(np.int32)
    codes = rng.integers(0, 2**32, 200) & (2 ** lengths.astype(np.int64) - 1)
    ends = np.cumsum(lengths, dtype=np.int64)
    words = on("native", lambda: bits.written(codes, lengths, -(-int(ends[-1]) // 32)))
    starts = ends - lengths
    found = bits.read(words[np.newaxis], starts[np.newaxis], lengths[np.newaxis])
    np.testing.assert_array_equal(found[0], codes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [33, -1, INT32.min])
def test_invalid_code_length(backend, length):
    lengths = np.array([3, length, 32], np.int32)
    for words in (1, 5):
        assert_rejected(
            backend, lambda: bits.written(np.arange(3), lengths, words), "lengths", str(length)  # noqa: B023
        )  # fmt: skip


# -------------------------------------------------------------------------------- bitmaps


@needs_native
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_bitmaps(density):
    rng = np.random.default_rng(0)
    for words in (0, 1, 2, 70):
        rows = []
        for _ in range(3):
            positions = np.flatnonzero(rng.random(32 * words) < density).astype(np.int32)
            filled = np.concatenate([positions, random_words(3)])  # unused slots
            expected = bitmap_numpy(filled, positions.size, words)
            for backend, got in both(
                lambda: bits.bitmap(filled, positions.size, words)  # noqa: B023
            ).items():
                assert_same_bits(got, expected, f"{backend} {words}")
            rows.append(expected)
        for slots in (0, 1, positions.size, 32 * words + 5):
            expected = set_bits_numpy(rows, slots)
            for backend, got in both(lambda: bits.set_bits(np.stack(rows), slots)).items():  # noqa: B023
                assert_same_bits(got, expected, f"{backend} {words} {slots}")


@needs_native
def test_last_bit_of_a_word():
    words = np.array([[INT32.min, 0, -1], [0, 0, INT32.min]], np.int32)
    expected = [[31, 64, 65, 66], [95, 0, 0, 0]], [[33], [1]]
    for positions, counts in both(lambda: bits.set_bits(words, 4)).values():
        assert positions.tolist() == expected[0] and counts.tolist() == expected[1]
    no_rows = np.zeros([0, 3], np.int32)
    for positions, counts in both(lambda: bits.set_bits(no_rows, 4)).values():
        assert positions.shape == (0, 4) and counts.shape == (0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@loop(
    ("positions", "count", "names"),
    [
        ([3, 9, 64], 3, ["index", "64"]),
        ([3, 9, INT32.max], 3, ["index", str(INT32.max)]),
        ([-1, 9, 20], 3, ["index", "-1"]),
        ([INT32.min, 9, 20], 3, ["index", str(INT32.min)]),
        ([3, 3, 20], 2, ["index", "ascend", "3"]),
        ([9, 3, 20], 2, ["index", "ascend", "3"]),
        ([3, 9, 20], 4, ["count", "4"]),
        ([3, 9, 20], -1, ["count", "-1"]),
    ],
)
def test_bad_positions(backend, positions, count, names):
    positions = np.array(positions, np.int32)
    assert_rejected(backend, lambda: bits.bitmap(positions, count, 2), "positions", *names)


# ------------------------------------------------------------------------------ Rice codes

EXTREMES = np.array([0, -1, 1, INT32.max, INT32.min, -5, 2**30, -(2**30)], np.int32)


def capacity(numbers, rice: int) -> int:
    """Returns the smallest sufficient number of bitmap words."""
    z = np.where(numbers < 0, -2 * numbers.astype(np.int64) - 1, 2 * numbers.astype(np.int64))
    return -(-int(((z >> rice) + 1).sum()) // 32)


@needs_native
@pytest.mark.parametrize("rice", [0, 1, 4, 11])
def test_rice_codes(rice):
    rng, rows = np.random.default_rng(rice), {}
    for count in (*COUNTS, 3000):
        rows = [np.rint(2**rice * rng.laplace(size=count)).astype(np.int32) for _ in range(3)]
        form = {"rice": rice, "bitmap_words": max(capacity(x, rice) for x in rows)}
        codes = [rice_encode_numpy(x, **form) for x in rows]
        for row, expected in zip(rows, codes, strict=True):
            for backend, got in both(lambda: rice_encode(row, **form)).items():  # noqa: B023
                assert_same_bits(got, expected, f"{backend} {count}")
        codes.append(np.zeros_like(codes[0]))  # without an error
        expected = rice_decode_numpy(codes, **form, count=count)
        np.testing.assert_array_equal(expected, [*rows, np.zeros(count)])
        form["count"] = count
        for backend, got in both(lambda: rice_decode(np.stack(codes), **form)).items():  # noqa: B023
            assert_same_bits(got, expected, f"{backend} {count}")


@needs_native
@pytest.mark.parametrize("rice", [20, 27, 30])
def test_rice_codes_of_every_int32(rice):
    form = {"rice": rice, "bitmap_words": capacity(EXTREMES, rice)}
    expected = rice_encode_numpy(EXTREMES, **form)
    for backend, got in both(lambda: rice_encode(EXTREMES, **form)).items():
        assert_same_bits(got, expected, backend)
    form["count"] = EXTREMES.size
    for got in both(lambda: rice_decode(expected[np.newaxis], **form)).values():
        np.testing.assert_array_equal(got[0], EXTREMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_beyond_the_capacity(backend):
    numbers = np.array([0, 31, 15, -16, 0], np.int32)  # 1 + 32 + 16 + 16 + 1 bits
    assert on(backend, lambda: rice_encode(numbers, rice=1, bitmap_words=3)).size == 1 + 3
    assert_rejected(
        backend, lambda: rice_encode(numbers, rice=1, bitmap_words=2), "numbers", "length", "65"
    )
    far = np.array([INT32.min] * 3, np.int32)
    assert_rejected(
        backend, lambda: rice_encode(far, rice=0, bitmap_words=2), "numbers", "length", str(2**32)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_malformed_rice_code(backend):
    form = {"rice": 30, "bitmap_words": 1}
    good = rice_encode_numpy([5, -9, 0], **form)

    def changed(bitmap: int):
        codes = np.stack([good, good])
        codes[1, -1] = bitmap
        return lambda: rice_decode(codes, **form, count=3)

    assert good[-1] == 0b111
    assert_rejected(backend, changed(0b1011001), "codes", "number of ones", "4")
    assert_rejected(backend, changed(1), "codes", "number of ones", "1")
    assert_rejected(backend, changed(0b1000011), "codes", "number of zeros", "4")
    assert on(backend, changed(0b100011)).shape == (2, 3)


# -------------------------------------------------------------------------------- all ops


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_mode(backend):
    """Shapes are static; the number of rows may be dynamic."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.int32), tf.TensorSpec([], tf.int32)])
    def run(words, count):
        codes = bits.unpacked(words, 12, 10)
        assert codes.shape.as_list() == [None, 10]
        again = bits.packed(codes, 12)
        assert again.shape.as_list() == [None, 4]
        positions, counts = bits.set_bits(words, 7)
        assert positions.shape.as_list() == [None, 7] and counts.shape.as_list() == [None, 1]
        bitmap = bits.bitmap(positions[0], count, 4)
        assert bitmap.shape.as_list() == [4]
        written = bits.written(tf.cast(codes[0], tf.int64), tf.fill([10], 12), 4)
        assert written.shape.as_list() == [4]
        code = rice_encode(tf.ensure_shape(codes[0], [10]), rice=9, bitmap_words=5)
        assert code.shape.as_list() == [8]
        numbers = rice_decode(code[tf.newaxis], rice=9, bitmap_words=5, count=10)
        assert numbers.shape.as_list() == [1, 10]
        return codes, again, positions, counts, bitmap, written, numbers

    words = random_words((2, 4)) & np.array([-1, -1, -1, 2**24 - 1])
    codes, again, positions, counts, bitmap, written, numbers = on(backend, lambda: run(words, 7))
    np.testing.assert_array_equal(codes, unpack_numpy(words, 12, 10))
    np.testing.assert_array_equal(again, words)
    np.testing.assert_array_equal(positions, set_bits_numpy(words, 7)[0])
    np.testing.assert_array_equal(counts, set_bits_numpy(words, 7)[1])
    np.testing.assert_array_equal(bitmap, bitmap_numpy(positions[0], 7, 4))
    np.testing.assert_array_equal(written, words[0])
    np.testing.assert_array_equal(numbers[0], codes[0])


@needs_native
def test_native_ops_run(monkeypatch):
    """They do not run if the library lacks kernels for the GPU of a tensor."""
    library, called = native.load(), []

    class Library:
        def __getattr__(self, name):
            called.append(name)
            return getattr(library, name)

    monkeypatch.setattr(native, "load", Library)

    def run():
        bits.packed([1], 3), bits.unpacked([[1]], 3, 1), bits.written([1], [1], 1)
        bits.bitmap([1], 1, 1), bits.set_bits([[1]], 1)
        rice_decode(rice_encode([1], rice=1, bitmap_words=1)[None], rice=1, bitmap_words=1, count=1)

    on("tensorflow", run)
    assert called == []
    on("native", run)
    assert called == [f"redsync_{op}" for op in ops_of_bits()]
    called.clear()
    monkeypatch.setattr(native, "serves", lambda tensors: False)
    on("native", run)
    assert called == []


def ops_of_bits():
    return (
        "pack_bits", "unpack_bits", "write_bits", "bitmap", "set_bits", "rice_encode",
        "rice_decode",
    )  # fmt: skip


@loop(
    ("run", "text"),
    [
        (lambda: bits.packed([1], 33), r"`bits` must be in \[0, 32\].*33"),
        (lambda: bits.packed([1], -1), "`bits`.*-1"),
        (lambda: bits.unpacked([[1]], 33, 1), "`bits`.*33"),
        (lambda: bits.unpacked([[1]], 1, -1), "`count`.*-1"),
        (lambda: bits.written([1], [1], -1), "`words`.*-1"),
        (lambda: bits.bitmap([1], 1, 2**26 + 1), f"`words`.*{2**26 + 1}"),
        (lambda: bits.set_bits([[1]], -1), "`slots`.*-1"),
        (lambda: bits.set_bits(tf.zeros([0, 2**26], tf.int32), 1), f"`words`.*{2**26}"),
        (lambda: rice_encode([1], rice=31, bitmap_words=1), "`rice`.*31"),
        (lambda: rice_encode([1], rice=1, bitmap_words=-1), "`bitmap_words`.*-1"),
        (lambda: rice_decode([[1]], rice=1, bitmap_words=0, count=-1), "`count`.*-1"),
    ],
)
def test_bad_arguments(run, text):
    with pytest.raises(ValueError, match=text):
        run()


@needs_native
@loop(
    ("op", "arguments", "text"),
    [
        ("pack_bits", {"codes": [1], "bits": 33}, "`bits` must be in .*33"),
        ("unpack_bits", {"words": [[1]], "bits": 33, "count": 1}, "`bits` must be in .*33"),
        ("unpack_bits", {"words": [1], "bits": 1, "count": 1}, "words|rank"),
        ("write_bits", {"codes": [1], "lengths": [1, 2], "size": 1}, "lengths|equal"),
        ("bitmap", {"positions": [1], "count": [1], "size": 1}, "count|rank"),
        ("bitmap", {"positions": [1], "count": 1, "size": 2**26 + 1}, "`size` must be in"),
        ("set_bits", {"words": [1], "slots": 1}, "words|rank"),
        ("set_bits", {"words": np.zeros([0, 2**26], np.int32), "slots": 1}, "`words` must have"),
        ("rice_encode", {"numbers": [1], "rice": 31, "bitmap_words": 1}, "`rice` must be in .*31"),
        ("rice_decode", {"codes": [1], "rice": 1, "bitmap_words": 1, "count": 1}, "codes|rank"),
    ],
)
def test_bad_attributes(op, arguments, text):
    """Python rejects them earlier."""
    run = functools.partial(getattr(native.load(), f"redsync_{op}"), **arguments)
    for call in (run, tf.function(run)):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
            call()


@needs_native
@loop(
    ("op", "arguments"),
    [
        ("unpack_bits", {"words": np.zeros([256, 0], np.int32), "bits": 0, "count": 2**57 - 1}),
        ("set_bits", {"words": np.zeros([2**33, 0], np.int32), "slots": 2**31 - 1}),
        ("rice_decode", {"codes": np.zeros([2**33, 0], np.int32), "rice": 0, "bitmap_words": 0,
                         "count": 2**31 - 1}),
    ],
)  # fmt: skip
def test_results_beyond_int64_elements(op, arguments):
    with pytest.raises(tf.errors.InvalidArgumentError, match="overflow"):
        getattr(native.load(), f"redsync_{op}")(**arguments)


@needs_native
def test_results_do_not_depend_on_thread_groups():
    """Threads share rows, and also blocks of codes."""
    ops.set_backend("native")
    try:
        words = tf.constant(random_words((64, 700)))
        once = [bits.unpacked(words, 7, 3200).numpy(), bits.set_bits(words, 9000)[0].numpy()]
        for row in (0, 31, 63):
            alone = words[row : row + 1]
            np.testing.assert_array_equal(bits.unpacked(alone, 7, 3200)[0], once[0][row])
            np.testing.assert_array_equal(bits.set_bits(alone, 9000)[0][0], once[1][row])
    finally:
        ops.set_backend(None)
