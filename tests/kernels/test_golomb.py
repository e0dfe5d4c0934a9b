"""golomb_encode and golomb_decode: native, reference and oracle give equal words."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.deep import DEEP
from tests.kernels.common import assert_same_bits, both, needs_native, on
from tests.loops import loop
from tests.oracle.positions import golomb_bits_numpy, golomb_decode_numpy, golomb_encode_numpy
from tests.oracle.quantization import to_bits
from tf_redsync.ops import codecs
from tf_redsync.ops.message_layout import packed_words

BACKENDS = ("native", "tensorflow")
SIZES = (0, 1, 33, 1000, 30_000)


def choose(rng, size: int, slots: int) -> np.ndarray:
    return np.sort(rng.choice(size, slots, replace=False)).astype(np.int32)


def make(density: float, rank: int = 0):
    rng = np.random.default_rng(rank)
    slots = [min(n, max(1, int(n * density))) for n in SIZES]
    indices = [choose(rng, n, s) for n, s in zip(SIZES, slots, strict=True)]
    counts = np.array([rng.integers(0, s + 1) if s < 50 else s for s in slots], np.int32)
    return indices, counts, slots


DENSITIES = (0.001, 0.01, 0.1, 0.5, 1.0)
SHIFTS = (-2, 0, 5)  # bits above the optimum
ALL = [(density, shift) for density in DENSITIES for shift in SHIFTS]


@needs_native
@loop("density, shift", ALL if DEEP else ALL[::2])
def test_backends_and_oracle_agree(density, shift):
    n = 10_000
    rice = [max(codecs.golomb_parameter(n, int(density * n)) + shift, 0)] * len(SIZES)
    rows = []
    for rank in range(3):
        indices, counts, slots = make(density, rank)
        expected = golomb_encode_numpy(indices, counts, sizes=SIZES, rice=rice)
        run = both(lambda: codecs.golomb_encode(indices, counts, sizes=SIZES, rice=rice))  # noqa: B023
        for backend, got in run.items():
            assert_same_bits(got, expected, backend)
        rows.append(expected)
    assert expected.size == codecs.golomb_words(SIZES, slots, rice)
    layout = {"sizes": SIZES, "slots": slots, "rice": rice}
    expected = golomb_decode_numpy(rows, **layout)
    for row, sent, count in zip(expected[0], indices, counts, strict=True):
        assert (row[-1][:count] == sent[:count]).all()
    for backend, got in both(lambda: codecs.golomb_decode(rows, **layout)).items():
        assert_same_bits([*got.indices, got.counts], [*expected[0], expected[1]], backend)


@needs_native
def test_no_positions_overflow_the_code():
    """The worst cases: all at the end, at equal gaps, and every position."""
    size = 4096
    for slots in (1, 2, 31, 200, size):
        for rice in (0, 1, 4, 9, 30):
            leap = min(max(2**rice, 1), size // slots)
            for positions in (
                np.arange(size - slots, size), np.arange(slots), leap * np.arange(1, slots + 1) - 1,
            ):  # fmt: skip
                positions = positions.astype(np.int32)
                run = functools.partial(
                    codecs.golomb_encode, [positions], [slots], sizes=[size], rice=[rice]
                )
                message = on("native", run)
                assert message.size == codecs.golomb_words([size], [slots], [rice])
                layout = {"sizes": [size], "slots": [slots], "rice": [rice]}
                back = on("native", functools.partial(codecs.golomb_decode, [message], **layout))
                assert (back.indices[0] == positions).all()


@needs_native
@pytest.mark.parametrize(
    ("density", "bits"), [(0.1, 4.76), (0.01, 8.11), (0.005, 9.11), (0.001, 11.50)]
)
def test_bits_per_position(density, bits):
    """Counts the paper's average on a message; the message is hardly longer."""
    n = 2_000_000
    rng = np.random.default_rng(1)
    positions = np.flatnonzero(rng.random(n) < density).astype(np.int32)
    rice = codecs.golomb_parameter(n, positions.size)
    message = on(
        "native",
        lambda: codecs.golomb_encode([positions], [positions.size], sizes=[n], rice=[rice]),
    )
    bitmap = to_bits(message[1 + packed_words(positions.size, rice) :])
    used = positions.size * rice + np.flatnonzero(bitmap)[-1] + 1
    assert used / positions.size == pytest.approx(bits, rel=0.005)
    assert 32 * message.size < 1.1 * used


def test_parameter():
    """The shortest code of the worst positions; hardly longer than the best for average ones."""
    n = 1_000_000
    found = [codecs.golomb_parameter(n, int(p * n)) for p in (0.1, 0.01, 0.005, 0.001, 1e-4)]
    assert found == [3, 6, 7, 9, 13]
    for p in (1.0, 0.9, 0.5, 0.37, 0.03, 1e-3, 1e-6):
        k = int(p * n)
        worst = np.arange(n - k, n)
        bits = [
            sum(map(len, golomb_bits_numpy(worst[:1], b))) + (k - 1) * (b + 1) for b in range(31)
        ]
        assert codecs.golomb_parameter(n, k) == bits.index(min(bits))
        length = [b + 1 / (1 - (1 - p) ** (2.0**b)) for b in range(31)]
        assert length[codecs.golomb_parameter(n, k)] <= 1.05 * min(length)
    assert codecs.golomb_parameter(0, 0) == codecs.golomb_parameter(5, 5) == 0


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@loop(
    ("indices", "count", "names"),
    [
        ([3, 1, 7], 3, ["index", "tensor 1", "1"]),
        ([3, 3, 7], 3, ["index", "tensor 1", "3"]),
        ([3, 5, 40], 3, ["index", "tensor 1", "40"]),
        ([-1, 5, 7], 3, ["index", "tensor 1", "-1"]),
        ([1, 5, 7], 4, ["count", "tensor 1", "4"]),
        ([1, 5, 7], -2, ["count", "tensor 1", "-2"]),
    ],
)
def test_bad_positions(backend, indices, count, names):
    good = np.arange(2, dtype=np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        vectors = [good, np.array(indices, np.int32)]
        on(backend, lambda: codecs.golomb_encode(vectors, [2, count], sizes=[40, 40], rice=[2, 2]))
    assert all(name in str(caught.value) for name in names), caught.value


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_corrupted_message(backend):
    layout = {"sizes": (10, 500), "slots": (2, 20), "rice": (1, 3)}
    rng = np.random.default_rng(0)
    indices = [choose(rng, 10, 2), choose(rng, 500, 20)]
    good = golomb_encode_numpy(indices, [2, 20], sizes=layout["sizes"], rice=layout["rice"])

    def refused(word, value, *names):
        messages = np.stack([good, good])
        messages[1, word] = value
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            on(backend, lambda: codecs.golomb_decode(messages, **layout))
        assert all(name in str(caught.value) for name in names), caught.value

    second = codecs.golomb_words([10], [2], [1])  # where the second tensor's part begins
    refused(0, 3, "count", "tensor 0", "3")
    refused(0, -1, "count", "tensor 0", "-1")
    refused(0, 1, "number of ones", "tensor 0", "2")
    refused(2, 0, "number of ones", "tensor 0", "0")
    refused(second, 19, "number of ones", "tensor 1", "20")
    refused(good.size - 1, good[-1] | 1 << 30, "number of ones", "tensor 1", "21")
    refused(2, 0b1000001, "index", "tensor 0")  # gaps beyond the tensor
    for words in (good.size - 1, good.size + 1):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="messages"):
            on(backend, lambda: codecs.golomb_decode(np.zeros([2, words], np.int32), **layout))  # noqa: B023


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_mode(backend):
    """Also with dynamic numbers of slots and workers."""
    spec = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)]

    @tf.function(input_signature=spec)
    def encode(indices, count):
        return codecs.golomb_encode([indices], [count], sizes=[100], rice=[3])

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def decode(messages):
        return codecs.golomb_decode(messages, sizes=[100], slots=[4], rice=[3])

    @tf.function
    def static():
        message = codecs.golomb_encode([tf.range(4)], [4], sizes=[100], rice=[3])
        assert message.shape.as_list() == [codecs.golomb_words([100], [4], [3])]
        return message

    positions = np.array([0, 7, 8, 99], np.int32)
    message = on(backend, lambda: encode(positions, 4))
    assert on(backend, static).size == message.size
    got = on(backend, lambda: decode(np.stack([message] * 3)))
    assert (got.indices[0] == positions).all() and got.counts.tolist() == [[4]] * 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"indices": []}, "`indices` must hold at least one"),
        ({"sizes": [5, 6]}, "`sizes` must have one entry per tensor.*2 entries for 1"),
        ({"sizes": [2]}, "`slots` must be at most `sizes`.*slots=3, size=2"),
        ({"rice": [31]}, r"`rice` must be in \[0, 30\].*rice\[0\]=31"),
        ({"rice": [-1]}, "rice.*-1"),
    ],
)
def test_bad_arguments(change, text):
    arguments = {"indices": [np.arange(3, dtype=np.int32)], "sizes": [9], "rice": [2], **change}
    with pytest.raises(ValueError, match=text):
        codecs.golomb_encode(arguments.pop("indices"), [3], **arguments)


def test_fractions_are_rejected():
    with pytest.raises(TypeError, match=r"`sizes` must be ints.*10\.7"):
        codecs.golomb_encode([np.arange(3, dtype=np.int32)], [3], sizes=[10.7], rice=[2])
