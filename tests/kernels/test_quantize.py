"""quantize and dequantize_sum: native, reference and numpy oracle give equal bits."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.deep import DEEP
from tests.kernels.common import assert_same_bits, both, make_inputs, needs_native, on
from tests.loops import loop
from tests.oracle.quantization import (
    RANDOM,
    dequantize_sum_numpy,
    philox_numpy,
    quantize_numpy,
    uniform_numpy,
)
from tf_redsync.ops import codecs, native
from tf_redsync.ops.quantized_format import check_bucket_size

FORMATS = [
    {"mode": "sign"}, {"mode": "two_level"}, {"mode": "threshold"},
    *({"mode": "stochastic", "levels": s} for s in (1, 3, 7, 12, 127, 5000)),
    *({"mode": "uniform", "levels": s} for s in (1, 3, 10, 63, 65535)), {"mode": "natural"},
]  # fmt: skip
KINDS = ("normal", "student_t", "ties", "zero", "denormal")
KINDS_WITH_BUCKETS = {32: ("zero",), 96: ("normal",), 512: ("student_t",)}
SIZES = (0, 1, 31, 32, 33, 1000, 4097, 40_000)
STREAM = (7, -1, 1234)
every_format = pytest.mark.parametrize(
    "form", FORMATS, ids=lambda f: "-".join(map(str, f.values()))
)


def make_scales(sizes, form, bucket_size, seed=0):
    count = sum(codecs.quantized_scales(sizes, form["mode"], bucket_size))
    scales = np.random.default_rng(seed).gamma(2.0, size=count).astype(np.float32)
    scales[::7] = 0
    return (
        scales * (-1) ** np.arange(count, dtype=np.float32)
        if form["mode"] == "two_level"
        else scales
    )


def stream_of(form):
    return {"stream": STREAM} if form["mode"] in RANDOM else {}


def make_messages(sizes, form, bucket_size=None, ranks=2, kind="normal"):
    rows = []
    for rank in range(ranks):
        scales = make_scales(sizes, form, bucket_size, rank)
        tensors = make_inputs(kind, sizes, seed=rank)[0]
        rows.append(quantize_numpy(tensors, scales, **form, bucket_size=bucket_size)[0])
    return np.stack(rows)


def test_generator_is_philox():
    """Known answers from the test vectors of the generator's authors."""
    ones, pi = [2**32 - 1] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    known = [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (ones, ones[:2], "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for counter, key, words in known:
        got = philox_numpy([counter], key)[0]
        assert " ".join(f"{w:08x}" for w in got) == words


@needs_native
@every_format
@loop("bucket_size", [None, 32, 96, 512])
def test_backends_and_oracle_agree(form, bucket_size):
    for kind in KINDS_WITH_BUCKETS.get(bucket_size, KINDS) if not DEEP else KINDS:
        tensors = make_inputs(kind, SIZES)[0]
        scales = make_scales(SIZES, form, bucket_size)
        options = {**form, **stream_of(form), "bucket_size": bucket_size}
        results = both(lambda: codecs.quantize(tensors, scales, errors=True, **options))  # noqa: B023
        assert_same_bits(*results.values(), f"{kind}: native, reference")
        message = results["native"].message
        assert message.size == codecs.quantized_words(SIZES, **form, bucket_size=bucket_size)
        if kind != "denormal":
            expected = quantize_numpy(tensors, scales, **options)
            assert_same_bits(list(results["native"]), list(expected), f"{kind}: native, oracle")
        only = on("native", lambda: codecs.quantize(tensors, scales, **options))  # noqa: B023
        assert only.errors == [] and (only.message == message).all()


@needs_native
@every_format
@loop("bucket_size", [None, 96])
def test_sum_of_ranks(form, bucket_size):
    options = {**form, "bucket_size": bucket_size}
    like = [np.full(n, np.nan, np.float32) for n in SIZES]  # shapes only
    for ranks in (1, 5):
        messages = make_messages(SIZES, form, bucket_size, ranks)
        messages[ranks // 2, 0] = 0  # contributes 0, whatever its words
        messages[ranks // 2, 1:] = -1
        expected = dequantize_sum_numpy(messages, [(n,) for n in SIZES], **options)
        for backend in ("native", "tensorflow"):
            got = on(backend, lambda: codecs.dequantize_sum(messages, like, **options))  # noqa: B023
            assert_same_bits(got, expected, f"{backend}, {ranks} ranks")


# For each mode, the levels that are not powers of two, if it has any.
IN_GRAPHS = [f for f in FORMATS if DEEP or f.get("levels", 7) in (7, 10)]


@needs_native
@pytest.mark.parametrize("form", IN_GRAPHS, ids=lambda f: "-".join(map(str, f.values())))
def test_graph_equals_eager(form):
    """Graph optimization must not replace a division by a constant."""
    sizes = (33, 1000)
    tensors = make_inputs("normal", sizes)[0]
    scales = np.array([0.3, 0.7, 0.3, 0.7], np.float32)
    scales = scales[: sum(codecs.quantized_scales(sizes, form["mode"]))]

    def run():
        coded = codecs.quantize(tensors, scales, errors=True, **form, **stream_of(form))
        return coded, codecs.dequantize_sum([coded.message] * 3, tensors, **form)

    results = [on(b, f) for b in ("native", "tensorflow") for f in (run, tf.function(run))]
    for result in results[1:]:
        assert_same_bits(results[0], result, "graph, eager")


@needs_native
@pytest.mark.parametrize("backend", ["native", "tensorflow"])
def test_dynamic_shapes(backend):
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None])])
    def run(x, scales):
        coded = codecs.quantize([x], scales, mode="sign", errors=True)
        assert coded.message.shape.as_list() == [None]
        return codecs.dequantize_sum(coded.message[None], [x], mode="sign")[0] + coded.errors[0]

    x = tf.reshape(tf.range(-6.0, 6.0), [3, 4])
    assert_same_bits(on(backend, lambda: run(x, [2.0])), x.numpy(), "decoded + error")

    @tf.function
    def static():
        return codecs.quantize([x], [1.0], mode="sign").message

    on(backend, lambda: static.get_concrete_function())
    assert on(backend, static).shape == (3,)


@needs_native
@pytest.mark.parametrize(
    ("form", "deviation"),
    [
        ({"mode": "stochastic", "levels": 3}, 1 / 6),  # at most half a level
        ({"mode": "uniform", "levels": 6}, 1 / 6),
        ({"mode": "uniform", "levels": 3}, 1 / 3),
        ({"mode": "natural"}, 8**-0.5),
    ],
    ids=str,
)
def test_random_modes_are_unbiased_and_streams_differ(form, deviation):
    """The mean over streams converges to the input; different streams give other codes."""
    x, n = np.linspace(-1, 1, 64).astype(np.float32), 600

    scales = [] if form["mode"] == "natural" else [1.0]

    def decoded(stream):
        coded = codecs.quantize([x], scales, **form, stream=stream, errors=True)
        return x - coded.errors[0].numpy()

    draws = np.stack([on("native", functools.partial(decoded, (5, 0, step))) for step in range(n)])
    assert np.abs(draws.mean(0) - x).max() < 5 * deviation / np.sqrt(n)
    assert 0.1 < draws.std() and len({d.tobytes() for d in draws}) == n
    base = decoded((1, 2, 3))
    assert (base == decoded((1, 2, 3))).all()
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (base != decoded(other)).any()


def test_uniform_numbers_are_uniform():
    u = uniform_numpy((3, 1, 4), 2, 100_000)
    counts = np.histogram(u, 50, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 110  # chi-square, 49 degrees of freedom: 1e-6
    assert u.min() >= 0 and u.max() < 1
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


@needs_native
@every_format
@loop("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values(form, bad):
    sizes, where = (31, 5000), [(0, 30), (1, 0), (1, 4999)]
    for tensor, at in where:
        tensors, scales = make_inputs("normal", sizes)[0], make_scales(sizes, form, None)
        tensors[tensor][at] = bad
        run = both(lambda: codecs.quantize(tensors, scales, **form, **stream_of(form)))  # noqa: B023
        assert not any(r.message.any() for r in run.values()), (tensor, at)
    if scales.size > 0 and not bad < 0:
        scales[-1] = bad
        tensors = make_inputs("normal", sizes)[0]
        run = both(lambda: codecs.quantize(tensors, scales, **form, **stream_of(form)))
        assert not any(r.message.any() for r in run.values())


@needs_native
@loop("backend", ["native", "tensorflow"])
@pytest.mark.parametrize(
    ("form", "bad_code"),
    [
        ({"mode": "sign"}, None),
        ({"mode": "threshold"}, 3),
        ({"mode": "stochastic", "levels": 3}, 7),
        ({"mode": "uniform", "levels": 10}, 15),
        ({"mode": "natural"}, 51),  # 510 or 511: the sign bit is in the previous word
    ],
    ids=lambda x: str(x),
)
def test_corrupted_message(backend, form, bad_code):
    sizes, options = (31, 1000), {**form, "bucket_size": 32}
    like = [np.zeros(n, np.float32) for n in sizes]

    def refused(word, value, *names):
        messages = make_messages(sizes, form, 32)
        messages[1, word] = value
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            on(backend, lambda: codecs.dequantize_sum(messages, like, **options))
        assert all(name in str(caught.value) for name in names), caught.value

    def bits(x):
        return np.float32(x).view(np.int32)

    refused(0, 2, "flag", "2")
    if form["mode"] != "natural":
        refused(1, bits(np.nan), "scale", "tensor 0", "nan")
        refused(3, bits(np.inf), "scale", "tensor 1", "inf")
        refused(2, bits(-0.5), "scale", "tensor 1", "-0.5")
    if bad_code is not None:
        refused(-1, -1, "code", "tensor 1", str(bad_code))


@needs_native
@pytest.mark.parametrize("backend", ["native", "tensorflow"])
def test_largest_power_of_two(backend):
    """2^127 is valid; 2^128 is rejected in values and in received codes."""

    def sent(x):
        run = lambda: codecs.quantize([[1.0, x]], [], mode="natural", stream=STREAM)  # noqa: E731
        return on(backend, run).message

    message = sent(-(2.0**127))
    total = on(backend, lambda: codecs.dequantize_sum([message], [[0.0, 0.0]], mode="natural"))
    assert total[0].tolist() == [1.0, -(2.0**127)]
    assert not sent(-3.4028235e38).any() and not sent(3.4028235e38).any()
    message[1] += 1 << 9  # the second code, which was 2 * 254 + 1: the largest exponent
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)code.*510"):
        on(backend, lambda: codecs.dequantize_sum([message], [[0.0, 0.0]], mode="natural"))


@needs_native
@pytest.mark.parametrize("backend", ["native", "tensorflow"])
def test_bad_arguments(backend):
    x = [np.zeros(40, np.float32)]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="scales|shape"):
        on(backend, lambda: codecs.quantize(x, [1.0, 1.0], mode="sign"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)scale.*-2"):
        on(backend, lambda: codecs.quantize(x, [-2.0], mode="threshold"))
    for words in (3, 5):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="messages|equal"):
            on(backend, lambda: codecs.dequantize_sum(np.zeros([2, words], "i4"), x, mode="sign"))  # noqa: B023
    empty = on(backend, lambda: codecs.dequantize_sum(np.zeros([0, 4], "i4"), x, mode="sign"))
    assert not empty[0].any()


@loop(
    ("change", "text"),
    [
        ({"tensors": []}, "`tensors` must hold at least one"),
        ({"mode": "ternary"}, "`mode` must be among .*'ternary'"),
        ({"levels": 2}, r"`levels` must be in \[1, 1\].*levels=2"),
        ({"mode": "stochastic", "stream": STREAM, "levels": 0}, "levels=0"),
        ({"mode": "stochastic", "stream": STREAM, "levels": 40_000}, "levels=40000"),
        ({"mode": "uniform", "stream": STREAM, "levels": 65_536}, r"\[1, 65535\].*levels=65536"),
        ({"mode": "natural", "stream": STREAM, "levels": 2}, r"\[1, 1\].*levels=2"),
        ({"bucket_size": 48}, "`bucket_size` must be a positive multiple of 32.*48"),
        ({"bucket_size": 0}, "bucket_size=0"),
        ({"bucket_size": 2**31}, "bucket_size=2147483648"),
        ({"bucket_size": 2**63 - 32}, f"bucket_size={2**63 - 32}"),
        ({"mode": "stochastic"}, "`stream` must be"),
        ({"mode": "natural"}, "`stream` must be"),
        ({"stream": STREAM}, "`stream` must be"),
    ],
)
def test_bad_arguments_at_construction(change, text):
    arguments = {"tensors": [np.zeros(3, np.float32)], "mode": "sign", **change}
    with pytest.raises(ValueError, match=text):
        codecs.quantize(arguments.pop("tensors"), [1.0], **arguments)


@needs_native
@loop("bucket_size", [-32, 48, 2**31, 2**63 - 32])
def test_bucket_sizes_rejected_by_the_op(bucket_size):
    options = {"mode": "sign", "bucket_size": bucket_size}
    library, x, message = native.load(), tf.zeros([100]), tf.zeros([1, 5], tf.int32)
    for run in (
        lambda: library.redsync_quantize(tensors=[x], scales=[], stream=[0, 0, 0], M=0, **options),
        lambda: library.redsync_dequantize_sum(messages=message, like=[x], **options),
    ):
        for call in (run, tf.function(run)):
            with pytest.raises(
                (tf.errors.InvalidArgumentError, ValueError), match=f"bucket_size={bucket_size}"
            ):
                call()


@loop("bucket_size", [-32, 48, 2**31])
def test_bucket_sizes_rejected_by_the_method(bucket_size):
    with pytest.raises(ValueError, match=f"`bucket_size`.*{bucket_size}"):
        check_bucket_size(bucket_size)


def test_bad_dtype():
    with pytest.raises(TypeError, match="`tensors` must be float32.*float64"):
        codecs.quantize([np.zeros(3)], [1.0], mode="sign")
