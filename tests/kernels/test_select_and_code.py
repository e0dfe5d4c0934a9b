"""select_and_code: one native op, composed ops, pure TensorFlow and oracle give equal bits."""

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import (
    KINDS,
    MOMENTA,
    assert_same_bits,
    make_inputs,
    make_k,
    needs_native,
    on,
)
from tests.loops import loop
from tests.oracle.coded_top_k import decode_numpy, select_and_code_numpy
from tf_redsync import ops
from tf_redsync.methods.common import coded_selection as coded
from tf_redsync.methods.common.adam_update import AdamUpdate
from tf_redsync.ops import native

SIZES = (0, 1, 31, 4097, 9000)
BACKENDS = [pytest.param("native", marks=needs_native), "tensorflow"]
# Implementations: the fused op, composed native ops, pure TensorFlow.
WAYS = ("one op", "native ops", "tensorflow")


def run(way: str, inputs, k, *, graph=False, momentum=(0.0, False), **options):
    """Runs `select_and_code`; returns numpy arrays."""
    grads, residuals, velocities = inputs
    factor, nesterov = momentum
    has_velocities = factor or "adam" in options

    def call():
        return coded.select_and_code(
            grads, residuals, velocities if has_velocities else [], [int(n) for n in k],
            momentum=factor, nesterov=nesterov, **options,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        if way == "native ops":
            patch.setattr(coded, "runs_natively", lambda tensors: False)
        backend = "tensorflow" if way == "tensorflow" else "native"
        return on(backend, tf.function(call) if graph else call)


def oracle(inputs, k, *, momentum=(0.0, False), **options):
    grads, residuals, velocities = inputs
    return select_and_code_numpy(
        grads, residuals, velocities if momentum[0] else [], k,
        momentum=momentum[0], nesterov=momentum[1], **options,
    )  # fmt: skip


CASES = [(kind, coded.VALUE_BITS[i % 5]) for i, kind in enumerate(KINDS)]
CASES += [("laplace", bits) for bits in coded.VALUE_BITS if ("laplace", bits) not in CASES]


@needs_native
@loop(("kind", "value_bits"), CASES)
def test_all_implementations_and_the_oracle_agree(kind, value_bits):
    turn = value_bits % 3
    name, momentum = list(MOMENTA.items())[turn]
    inputs, k = make_inputs(kind, SIZES), make_k(SIZES, first=value_bits)
    options = {
        "momentum": momentum, "masking": turn != 1, "scale": np.float32(0.7),
        "value_bits": value_bits,
    }  # fmt: skip
    results = [run(way, inputs, k, **options) for way in WAYS]
    for way, result in zip(WAYS, results, strict=True):
        assert_same_bits(result, results[0], f"{name}: {way}")
    if kind != "denormal":  # numpy keeps denormals, TensorFlow flushes them
        expected = oracle(inputs, k, **options)
        assert_same_bits(results[0], expected[:3], f"{name}: the oracle")
        sums = decode_numpy([results[0].message] * 2, [(n,) for n in SIZES], k, value_bits)
        for total, (index, value) in zip(sums, expected[3], strict=True):
            np.testing.assert_array_equal(total[index], 2 * value)


@needs_native
@pytest.mark.parametrize("value_bits", [1, 16])
def test_bfloat16_gradients(value_bits):
    (grads, *state), k = make_inputs("student_t", SIZES), make_k(SIZES, first=1)
    narrow = [tf.cast(g, tf.bfloat16) for g in grads]
    options = {"momentum": MOMENTA["plain"], "value_bits": value_bits}
    expected = oracle([[tf.cast(g, tf.float32).numpy() for g in narrow], *state], k, **options)
    for way in WAYS:
        result = run(way, [narrow, *state], k, **options)
        assert_same_bits(result, expected[:3], way)


def adam_inputs(kind, sizes=SIZES):
    """Gradients, residuals and second moments; and an update with a weight for each tensor."""
    grads, residuals, velocities = make_inputs(kind, sizes)
    weights = [np.float32(1 / (i + 1)) for i in range(len(sizes))]
    own = [4.0 if i % 2 else 1.0 for i in range(len(sizes))]
    update = AdamUpdate([tf.constant(w) for w in weights], workers=4.0, own=own, epsilon=1e-3)
    return (grads, residuals, [np.square(u) for u in velocities]), update


@needs_native
@loop("kind", [kind for kind in KINDS if kind != "denormal"])
def test_adam_updates(kind):
    """All implementations give equal bits, and the moments and sums of Adam's paper in float64."""
    inputs, update = adam_inputs(kind)
    k, scale = make_k(SIZES, first=2), np.float32(0.7)
    options = {"adam": update, "value_bits": 4, "scale": scale}
    results = [run(way, inputs, k, **options) for way in WAYS]
    for way, result in zip(WAYS, results, strict=True):
        assert_same_bits(result, results[0], way)
    sums = decode_numpy([results[0].message], [(n,) for n in SIZES], k, 4)
    for i, (g, v, s) in enumerate(zip(*inputs, strict=True)):
        weight, t = np.float64(update.weights[i]), np.float64(scale) * g
        moment = (1 - weight) * s + weight * 4 * t**2
        inside = (1 - weight) * s + weight * update.own[i] * t**2
        accumulated = v + t / (np.sqrt(inside) + 1e-3)
        np.testing.assert_allclose(results[0].velocities[i], moment, rtol=1e-5)
        np.testing.assert_allclose(
            np.float64(results[0].residuals[i]) + sums[i], accumulated, rtol=1e-4, atol=1e-4
        )


@needs_native
def test_adam_updates_of_bfloat16_gradients():
    (grads, *state), update = adam_inputs("student_t")
    narrow, k = [tf.cast(g, tf.bfloat16) for g in grads], make_k(SIZES, first=1)
    wide = [tf.cast(g, tf.float32).numpy() for g in narrow]
    expected = run("one op", (wide, *state), k, adam=update, value_bits=1)
    for way in WAYS:
        assert_same_bits(run(way, (narrow, *state), k, adam=update, value_bits=1), expected, way)


@needs_native
def test_adam_updates_past_the_caches():
    """The native op stores results of tensors from 2^20 elements past the caches."""
    inputs, update = adam_inputs("laplace", ((1 << 20) + 5,))
    options = {"adam": update, "value_bits": 1}
    expected, *others = (run(way, inputs, [3000], **options) for way in WAYS)
    for way, result in zip(WAYS[1:], others, strict=True):
        assert_same_bits(result, expected, way)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_second_moments_are_nonfinite(backend):
    """Their update would be 0."""
    way = "one op" if backend == "native" else backend
    for tensor, at in ((1, 30), (2, 4096)):
        for large, sent in ((1e18, True), (-2e19, False)):
            inputs, update = adam_inputs("normal", (0, 31, 4097))
            inputs[0][tensor][at] = large
            result = run(way, inputs, [0, 3, 50], adam=update, value_bits=4)
            assert result.message.any() == sent, (tensor, large)


@needs_native
@pytest.mark.parametrize("value_bits", [1, 3, 16])
def test_decoders_agree(value_bits):
    k = make_k(SIZES, first=1)
    messages = np.stack(
        [oracle(make_inputs(kind, SIZES), k, value_bits=value_bits)[0] for kind in list(KINDS)[:3]]
    )
    expected = decode_numpy(messages, [(n,) for n in SIZES], k, value_bits)
    for backend in ("native", "tensorflow"):
        assert_same_bits(on(backend, lambda: sums(messages, k, value_bits)), expected, backend)  # noqa: B023


def sums(messages, k, value_bits):
    like, layout = [tf.zeros([n]) for n in SIZES], ops.MessageLayout.of([int(n) for n in k])
    plain = coded.uncode_messages(tf.constant(messages), like, layout, value_bits)
    return ops.decode(plain, layout, like)


@needs_native
@loop("value_bits", coded.VALUE_BITS)
def test_plain_messages_equal_the_composed_ops(value_bits):
    """Includes a worker with a non-finite gradient."""
    k = make_k(SIZES, first=1)
    rows = [oracle(make_inputs(kind, SIZES), k, value_bits=value_bits)[0] for kind in KINDS]
    messages = np.stack([*rows, np.zeros_like(rows[0])])
    like, layout = [tf.zeros([n]) for n in SIZES], ops.MessageLayout.of([int(n) for n in k])
    expected, _ = coded.coding(value_bits).decode(tf.constant(messages), like, layout)
    got = on(
        "native", lambda: coded.uncode_messages(tf.constant(messages), like, layout, value_bits)
    )
    assert got.shape == (len(messages), layout.words)
    assert_same_bits(got, expected.numpy(), value_bits)


@needs_native
def test_malformed_position_codes():
    like, layout = [tf.zeros([60])], ops.MessageLayout.of([9])
    good = oracle(make_inputs("normal", (60,)), [9], value_bits=2)[0]
    for at, bad, text in ((1, 10, "count"), (1, -1, "count"), (1, 8, "ones"), (3, 0, "ones")):
        messages = np.stack([good, good])
        messages[1, at] = bad
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"messages.*{text}") as caught:
            on("native", lambda: coded.uncode_messages(tf.constant(messages), like, layout, 2))  # noqa: B023
        assert "of tensor" not in str(caught.value)  # tensors share streams
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="messages"):
        on("native", lambda: coded.uncode_messages(tf.zeros([2, 3], tf.int32), like, layout, 2))


@needs_native
@pytest.mark.parametrize("value_bits", [1, 4, 16])
def test_longest_code_fits(value_bits):
    """Clusters at the ends, and equal gaps: the most expensive cases, with different densities."""
    sizes, k = (33_000, 500, 12_000), [1000, 50, 360]
    grads = [np.full(n, 1e-3, np.float32) for n in sizes]
    grads[0][32::33] = np.linspace(1, 2, 1000)
    grads[1][-50:] = 1
    grads[2][-360:] = -1
    zeros = [np.zeros_like(g) for g in grads]
    for way in WAYS:
        result = run(way, (grads, zeros, zeros), k, value_bits=value_bits)
        expected = oracle((grads, zeros, zeros), k, value_bits=value_bits)
        assert_same_bits(result, expected[:3], way)
        for residual, grad, sent in zip(result.residuals, grads, k, strict=True):
            assert np.count_nonzero(residual != grad) == sent


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_values(backend, bad):
    for tensor, where in ((0, 30), (1, 4096)):
        inputs = make_inputs("normal", (31, 4097))
        inputs[0][tensor][where] = bad
        way = "one op" if backend == "native" else backend
        for value_bits in (1, 16):
            result = run(way, inputs, [3, 50], value_bits=value_bits, momentum=(0.9, False))
            assert not result.message.any(), (tensor, where)


@pytest.mark.parametrize("backend", BACKENDS)
def test_magnitudes_are_below_2_to_the_96(backend):
    way, limit = "one op" if backend == "native" else backend, np.float32(2.0**96)
    for value, sent in ((limit, False), (np.nextafter(limit, np.float32(0)), True)):
        grad = np.array([value, 1.0, 2.0], np.float32)
        for bits in (1, 16):
            result = run(way, [[grad], [0 * grad], []], [2], value_bits=bits)
            assert result.message.any() == result.message[0] == sent


@needs_native
def test_graph_equals_eager():
    inputs, k = make_inputs("laplace", (1000,)), [90]
    options = {"value_bits": 2, "momentum": (0.9, True)}
    eager = run("one op", inputs, k, **options)
    for way in ("one op", "tensorflow"):
        assert_same_bits(run(way, inputs, k, graph=True, **options), eager, way)


@needs_native
def test_inputs_are_not_modified():
    inputs = [[tf.constant(x) for x in xs] for xs in make_inputs("normal", SIZES)]
    before = [[t.numpy().copy() for t in ts] for ts in inputs]
    run("one op", inputs, make_k(SIZES), value_bits=1, momentum=(0.9, False))
    assert_same_bits([[t.numpy() for t in ts] for ts in inputs], before, "inputs")


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_length(backend):
    x = [tf.zeros([4, 25]), tf.zeros([0, 3])]

    @tf.function
    def lengths():
        return [
            coded.select_and_code(x, x, [], [30, 0], value_bits=bits).message.shape.as_list()
            for bits in (3, 16)
        ]

    zeros = [t.numpy() for t in x]
    for bits, length in zip((3, 16), on(backend, lengths), strict=True):
        assert length == [oracle([zeros, zeros, []], [30, 0], value_bits=bits)[0].size]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [[0, 3], [1, 5000], [-1, 3]])
def test_k_out_of_range(backend, k):
    inputs = make_inputs("normal", (31, 1000))
    way = "one op" if backend == "native" else backend
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="`(k|slots)` must be"):
        run(way, inputs, k, value_bits=1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grads": []}, "`grads`"),
        ({"residuals": []}, "`residuals`"),
        ({"velocities": [np.zeros(5, np.float32)]}, "`velocities`"),
        ({"momentum": -1.0}, "`momentum`"),
        ({"value_bits": 5}, "`value_bits` must be one of.*5"),
        ({"residuals": [np.zeros(4, np.float32)]}, "shapes of `grads`"),
    ],
)
def test_bad_arguments(change, text):
    x = [np.zeros(5, np.float32)]
    arguments = {"grads": x, "residuals": x, "velocities": [], "value_bits": 1, **change}
    with pytest.raises(ValueError, match=text):
        coded.select_and_code(**arguments, k=[2])


ADAM = np.float32([[0.9, 0.1, 0.1]])  # factors of one tensor


@needs_native
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": [2, 3]}, "`k` must have one entry"),
        ({"rice": [31]}, r"`rice` must be in \[0, 30\]"),
        ({"streams": [1]}, r"`streams` must be in \[0, 0\]"),
        ({"value_bits": 5}, "`value_bits` must be in"),
        ({"U": 7}, "`U`.*U=7"),
        ({"momentum": 0.9}, "`velocities` must"),
        ({"epsilon": 1e-7}, "`velocities` must"),
        ({"epsilon": 1e-7, "velocities": [np.zeros(5, np.float32)], "adam": ADAM}, "`U`.*U=0"),
        ({"adam": ADAM}, "`adam` must"),
    ],
)
def test_bad_attributes(change, text):
    """Python rejects them earlier."""
    x = [tf.zeros([5])]
    arguments = {"k": [2], "streams": [0], "rice": [1], "value_bits": 1, "U": 0, **change}
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
        without = {"velocities": [], "adam": np.zeros([0, 3], np.float32)}
        native.load().redsync_select_and_code(
            grads=x, residuals=x, scale=1.0, **{**without, **arguments}
        )
