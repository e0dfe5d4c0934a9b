"""Message checksums: native, reference and oracle agree, and every changed bit is detected."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import assert_same_bits, both, needs_native, on
from tests.loops import loop
from tests.oracle import checksums as oracle
from tf_redsync.ops import native, wire

BACKENDS = [pytest.param("native", marks=needs_native), "tensorflow"]
INT32 = np.iinfo(np.int32)
SENDERS, RECEIVER = np.array([4, wire.NO_SENDER, 7], np.int32), np.int32(2)  # no op at import


def messages(words: int, rows: int = 3, seed: int = 0) -> np.ndarray:
    """Returns random messages with flags 1, 0, 1, ..."""
    rng = np.random.default_rng(seed)
    out = rng.integers(INT32.min, INT32.max + 1, (rows, words)).astype(np.int32)
    out[:, 0] = (np.arange(rows) + 1) % 2
    return out


def opened(backend, sealed, senders=(0, 1, 2), receiver=2):
    senders = list(senders)[: len(sealed)]
    ranks = tf.constant(senders, tf.int32)
    return on(backend, lambda: wire.opened(tf.constant(sealed), ranks, receiver))


@needs_native
@loop("words", [1, 2, 3, 1024, 1025, 1026, 5000])
def test_checksums_equal_the_oracle(words):
    plain = messages(words)
    expected = oracle.sealed_numpy(plain)
    for backend, sealed in both(lambda: wire.sealed(tf.constant(plain))).items():
        assert_same_bits(sealed, expected, f"{backend} {words}")
        assert_same_bits(opened(backend, sealed), plain, f"{backend} {words}")


@needs_native
def test_many_short_messages():
    """Sums up to the prime: the reference's last product is one of two numbers below 2^32."""
    for words in (2, 3, 4):
        plain = messages(words, rows=300, seed=words)
        expected = oracle.sealed_numpy(plain)
        for backend, sealed in both(lambda: wire.sealed(tf.constant(plain))).items():  # noqa: B023
            assert_same_bits(sealed, expected, f"{backend} {words}")


@needs_native
@loop("rows", [0, 1, 2])
def test_arbitrary_words(rows):
    """Includes invalid checksums, and messages of dynamic length."""
    plain = np.array([[1, -1, -5, -6, 4, 0], [0, 0, 0, 0, 0, 0]], np.int32)[:rows]
    expected = oracle.sealed_numpy(plain)
    shape = tf.TensorSpec([None, None], tf.int32)
    for backend in ("native", "tensorflow"):
        seal = tf.function(wire.sealed, input_signature=[shape])
        sealed = on(backend, functools.partial(seal, plain))
        assert_same_bits(sealed, expected, backend)
        assert_same_bits(opened(backend, sealed), plain, backend)


@needs_native
def test_long_message():
    """More blocks than words in a block: covers all levels of the reference."""
    plain = messages(2**21, rows=1)
    sealed = both(lambda: wire.sealed(tf.constant(plain)))
    assert_same_bits(sealed["native"], sealed["tensorflow"], "2^21 words")
    words = [int(w) for w in plain[0, 1:].view(np.uint32)]
    sum_of_blocks, power = 0, 1
    for start in range(0, len(words), 4096):  # Horner's rule from the end, block by block
        block = oracle.checksum(words[start : start + 4096])
        sum_of_blocks = (sum_of_blocks + block * power) % oracle.PRIME
        power = power * pow(oracle.BASE, 4096, oracle.PRIME) % oracle.PRIME
    term = int(oracle.sealed_numpy([[1]])[0].view(np.uint32)[0])
    assert int(sealed["native"][0, :1].view(np.uint32)[0]) == (sum_of_blocks + term) % oracle.PRIME


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_flipped_bit_is_detected(backend):
    """Flips one bit at each position and names the only sender; one call per bit number."""
    plain = messages(9, rows=1)
    sealed = on(backend, lambda: wire.sealed(tf.constant(plain)))
    for place in range(9):
        for bit in (0, 1, 5, 16, 30, 31):
            bad = sealed.copy()
            bad[0, place] ^= np.uint32(1 << bit).astype(np.int32)
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                opened(backend, np.concatenate([sealed, bad]), senders=[3, 6], receiver=5)
            text = str(caught.value)
            assert "corrupted message" in text and "checksum" in text
            assert "6" in text.split("from worker")[1] and "5" in text, text


@needs_native
def test_two_flipped_bits_swapped_and_lost_words_are_detected():
    rng = np.random.default_rng(0)
    sealed = oracle.sealed_numpy(messages(200, rows=1, seed=1))
    pairs = [sealed.copy() for _ in range(2000)]
    for bad in pairs:
        first, second = rng.choice(200 * 32, 2, replace=False)
        for place in (first, second):
            bad[0, place // 32] ^= np.uint32(1 << int(place % 32)).astype(np.int32)
    swapped = sealed.copy()
    swapped[0, [7, 9]] = swapped[0, [9, 7]]
    others = [swapped, np.roll(sealed, 1, axis=1), np.zeros_like(sealed), np.full_like(sealed, -1)]
    for bad in (*pairs, *others):
        with pytest.raises(tf.errors.InvalidArgumentError, match="from worker 8"):
            opened("native", bad, senders=[8])


def test_base_detects_any_two_bits_within_reach():
    """No power of the base, up to the reach, is a quotient of two bits: +-2^a, |a| < 32."""
    prime, step = oracle.PRIME, np.uint64(oracle.PRIME)
    between = {sign * pow(2, a, prime) % prime for a in range(-31, 32) for sign in (1, -1)}
    between = np.array(sorted(between), np.uint64)
    powers = np.ones(1, np.uint64)
    while len(powers) < 2**15:  # by doubling
        factor = np.uint64(pow(oracle.BASE, len(powers), prime))
        powers = np.concatenate([powers, powers * factor % step])
    for block in range(0, oracle.REACH + 2, len(powers)):
        factor = np.uint64(pow(oracle.BASE, block, prime))
        found = np.flatnonzero(np.isin(powers * factor % step, between)) + block
        assert found.tolist() == ([0] if block == 0 else []), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_message_without_a_sender_is_unchanged(backend):
    sealed = oracle.sealed_numpy(messages(4))
    sealed[1] = [1, 0, 0, 0]
    got = on(backend, lambda: wire.opened(tf.constant(sealed), SENDERS, RECEIVER))
    assert got[:, 0].tolist() == [1, 1, 1] and got[1].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_invalid_flag(backend):
    for flag in (2, -1, INT32.min):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s)invalid flag.*{flag}"):
            on(backend, lambda: wire.sealed(tf.constant([[flag, 5]])))  # noqa: B023


@needs_native
@loop("dtype", [tf.float32, tf.int32, tf.float64])
def test_variables_have_the_checksum_of_their_bits(dtype):
    rng = np.random.default_rng(1)
    values = [rng.normal(size=shape) * 100 for shape in ([], [3], [5, 7], [70_000], [0])]
    variables = [tf.Variable(tf.cast(v, dtype)) for v in values]
    handles = [v.handle for v in variables]
    seals = native.load().redsync_seal_variables(variables=handles)
    for variable, seal in zip(variables, seals.numpy(), strict=True):
        words = np.frombuffer(variable.numpy().tobytes(), np.int32)
        message = np.concatenate([np.ones(1, np.int32), words])[np.newaxis]
        assert seal == oracle.sealed_numpy(message)[0, 0]


@needs_native
def test_checksums_of_variables_follow_graph_assignments():
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def twice():
        seal = native.load().redsync_seal_variables
        before = seal(variables=[variable.handle])
        variable.assign_add([1.0, 0.0])
        return before, seal(variables=[variable.handle])

    before, after = twice()
    for seal, values in ((before, [1.0, 2.0]), (after, [2.0, 2.0])):
        words = np.array(values, np.float32).view(np.int32)
        message = np.concatenate([np.ones(1, np.int32), words])[np.newaxis]
        assert seal.numpy()[0] == oracle.sealed_numpy(message)[0, 0]


@needs_native
@pytest.mark.parametrize(
    ("value", "dtype"), [([1.0], tf.bfloat16), (["a", 100 * "b"], tf.string)], ids=["half", "text"]
)
def test_variables_without_whole_words_are_rejected(value, dtype):
    handles = [tf.Variable(value, dtype=dtype).handle]
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"variables\[0\] of {dtype.name}"):
        native.load().redsync_seal_variables(variables=handles)
