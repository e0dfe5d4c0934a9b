"""accumulate_and_select: native, reference and numpy oracle give equal bits."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.deep import DEEP
from tests.kernels.common import (
    KINDS,
    MOMENTA,
    SIZES,
    assert_same_bits,
    make_inputs,
    make_k,
    needs_native,
    select,
)
from tests.loops import loop
from tests.oracle.coded_top_k import bfloat16_numpy, from_bfloat16
from tests.oracle.redsync import accumulate_and_select_numpy
from tf_redsync.ops import native

SELECTORS = ("exact", "trimmed", "threshold")
RATIOS = np.array([-1, 0.25, 0.3, 0.5, 0.7, 0.8, 0.6, 0.75], np.float32)


def oracle(inputs, k, ratios, *, momentum=(0.0, False), **options):
    grads, residuals, velocities = inputs
    return accumulate_and_select_numpy(
        grads, residuals, velocities if momentum[0] else [], k, ratios,
        momentum=momentum[0], nesterov=momentum[1], **options,
    )  # fmt: skip


@needs_native
@pytest.mark.parametrize("quantized", [False, True], ids=["values", "quantized"])
@loop("selector", SELECTORS)
@loop("kind", KINDS)
def test_backends_and_oracle_agree(kind, selector, quantized):
    """By default each kind and selector has one momentum, each of these several kinds."""
    layout = {"selectors": [selector] * len(SIZES), "quantized": [quantized] * len(SIZES)}
    inputs = make_inputs(kind)
    only = (list(KINDS).index(kind) + SELECTORS.index(selector) + quantized) % len(MOMENTA)
    for turn, (name, momentum) in enumerate(MOMENTA.items()):
        if not DEEP and turn != only:
            continue
        options = {
            **layout,
            "momentum": momentum,
            "masking": turn != 1,
            "scale": np.float32(0.7),
            "side": -1 if turn == 2 else 1,
            "search": turn != 0,  # without momentum the given ratios are tried first
        }
        k = make_k(first=turn)
        results = {b: select(b, inputs, k, RATIOS, **options) for b in ("native", "tensorflow")}
        assert_same_bits(results["native"], results["tensorflow"], f"{name}: native, reference")
        if kind != "denormal":  # numpy keeps denormals, TensorFlow flushes them
            expected = oracle(inputs, k, RATIOS, **options)
            assert_same_bits(results["native"], expected, f"{name}: native, oracle")


@needs_native
@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.deep)])
@loop("selector", [*SELECTORS, "fixed"])
def test_bfloat16_gradients(selector, graph):
    """Next to float32 ones; the oracle gets the values of their bits."""
    n = len(SIZES)
    for turn, momentum in enumerate(MOMENTA.values()):
        (grads, *state), k = make_inputs("student_t", seed=turn), make_k(first=turn)
        given, numbers = list(grads), list(grads)
        for i in (1, 2, 4, 5, 7):
            halves = bfloat16_numpy(grads[i])
            given[i] = tf.bitcast(tf.constant(halves.astype(np.uint16)), tf.bfloat16)
            numbers[i] = from_bfloat16(halves)
        options = {
            "selectors": [selector] * n, "quantized": [i % 2 == 0 for i in range(n)],
            "momentum": momentum, "scale": np.float32(0.7),
        }  # fmt: skip
        ratios = np.abs(RATIOS)
        expected = oracle([numbers, *state], k, ratios, **options)
        for backend in ("native", "tensorflow"):
            result = select(backend, [given, *state], k, ratios, graph=graph, **options)
            assert_same_bits(result, expected, f"{backend}, {momentum}")


@needs_native
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_bfloat16(bad):
    grads, residuals, _ = make_inputs("normal", (70_000,))
    grads[0][69_999] = bad
    narrow = [tf.cast(grads[0], tf.bfloat16)]
    for backend in ("native", "tensorflow"):
        result = select(backend, (narrow, residuals, []), [50], [-1], selectors="exact")
        assert not result.message.any()


@needs_native
@loop("selector", SELECTORS)
@loop("kind", ["normal", "clustered", "constant", "ties", "sparse", "outlier"])
def test_large_tensors(kind, selector):
    # Several blocks, a predicted threshold, and, if the prediction fails, histograms.
    sizes = (300_001, 200_000)
    inputs, k = make_inputs(kind, sizes, seed=1), np.array([300, 50_000], np.int32)
    for quantized in (False, True):
        options = {"selectors": [selector] * 2, "quantized": [quantized] * 2}
        result = select("native", inputs, k, [-1, -1], **options, momentum=(0.9, True))
        expected = oracle(inputs, k, [-1, -1], **options, momentum=(0.9, True))
        assert_same_bits(result, expected, f"quantized={quantized}")


@needs_native
@pytest.mark.parametrize("quantized", [False, True], ids=["values", "quantized"])
@loop("kind", KINDS)
def test_fixed_threshold(kind, quantized):
    # Too few pass, too many pass, all pass; a capacity of all elements; a tie at the threshold.
    sizes = (*SIZES, 50_000)
    inputs = make_inputs(kind, sizes)
    thresholds = (0.0, 0.37, 1.0, 2.5, np.inf)
    first = list(KINDS).index(kind) + quantized
    for turn, threshold in enumerate(thresholds):
        if not DEEP and (turn - first) % len(thresholds) > 1:
            continue  # two of them with each kind, each of them with four kinds
        options = {
            "selectors": ["fixed"] * len(sizes), "quantized": [quantized] * len(sizes),
            "momentum": list(MOMENTA.values())[turn % 3], "side": -1 if turn % 2 else 1,
        }  # fmt: skip
        k, ratios = make_k(sizes, first=turn), np.full(len(sizes), threshold, np.float32)
        results = {b: select(b, inputs, k, ratios, **options) for b in ("native", "tensorflow")}
        assert_same_bits(
            results["native"], results["tensorflow"], f"{threshold}: native, reference"
        )
        assert_same_bits(results["native"].ratios, ratios, "ratios stay")
        if kind != "denormal":
            expected = oracle(inputs, k, ratios, **options)
            assert_same_bits(results["native"], expected, f"{threshold}: native, oracle")


@needs_native
@pytest.mark.parametrize("backend", ["native", "tensorflow"])
def test_fixed_threshold_out_of_range(backend):
    inputs = make_inputs("normal", (31, 5))
    options = {"selectors": ["exact", "fixed"], "quantized": [False] * 2}
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)`ratios` must be >= 0.*-0.5"):
        select(backend, inputs, [3, 2], [-1.0, -0.5], **options)
    # The fit had non-finite input: the step is skipped without an error.
    assert not select(backend, inputs, [3, 2], [-1.0, np.nan], **options).message.any()


@needs_native
@loop("large", [False, True])
@loop("bad", [np.inf, -np.inf, np.nan])
@loop("selector", SELECTORS)
def test_nonfinite_values(selector, bad, large):
    sizes = (31, 100_000 if large else 4097)
    options = {"selectors": [selector] * 2, "quantized": [False, True]}
    for tensor, where in ((0, 30), (1, 0), (1, sizes[1] - 1)):
        inputs = make_inputs("normal", sizes)
        inputs[0][tensor][where] = bad
        for backend in ("native", "tensorflow"):
            result = select(backend, inputs, [3, 50], [0.25, 0.5], **options, momentum=(0.9, False))
            assert not result.message.any(), (backend, tensor, where)
            assert_same_bits(result.ratios, np.array([0.25, 0.5], np.float32), backend)


@needs_native
def test_overflow_is_not_finite():
    inputs = [[np.full(5, 3e38, np.float32)] for _ in range(3)]
    for backend in ("native", "tensorflow"):
        result = select(backend, inputs, [2], [-1], selectors=["exact"], quantized=[False])
        assert not result.message.any()


@needs_native
@pytest.mark.parametrize("sign", [1, -1])
def test_magnitudes_are_below_2_to_the_96(sign):
    """Sums over any number of workers then fit into float32."""
    limit = np.float32(2.0**96)
    for value, sent in ((limit, False), (np.nextafter(limit, np.float32(0)), True)):
        inputs = [[np.zeros(100, np.float32)] for _ in range(3)]
        inputs[1][0][70] = sign * value
        for backend in ("native", "tensorflow"):
            result = select(backend, inputs, [2], [-1], selectors=["exact"], quantized=[False])
            assert result.message[0] == sent, (backend, value)


@needs_native
@pytest.mark.parametrize("size", [31, 70_000, 2_000_000])  # the last one bypasses the caches
def test_velocities_that_are_not_returned(size):
    """They are applied in the step as usual."""
    inputs, k = make_inputs("normal", (size,)), [size // 10]
    options = {"selectors": ["exact"], "quantized": [False], "momentum": (0.9, False)}
    kept = select("native", inputs, k, [-1], masking=False, **options)
    for backend in ("native", "tensorflow"):
        result = select(backend, inputs, k, [-1], keep_velocities=False, **options)
        assert_same_bits(result.message, kept.message, backend)
        assert_same_bits(result.residuals, kept.residuals, backend)
        assert len(kept.velocities) == 1 and not result.velocities


@needs_native
@pytest.mark.parametrize("selector", SELECTORS)
def test_graph_equals_eager(selector):
    # Grappler must not reorder the float arithmetic of the reference.
    sizes = SIZES if DEEP else (31, 4097)
    inputs, k = make_inputs("normal", sizes), make_k(sizes, first=1)
    options = {"selectors": [selector] * len(sizes), "quantized": [False] * len(sizes)}
    momenta = list(MOMENTA.values())
    for momentum in momenta if DEEP else [momenta[SELECTORS.index(selector)]]:
        results = [
            select(backend, inputs, k, RATIOS[: len(k)], momentum=momentum, graph=graph, **options)
            for backend, graph in (("native", True), ("tensorflow", True), ("tensorflow", False))
        ]
        assert_same_bits(results[0], results[1], "native, reference")
        assert_same_bits(results[1], results[2], "reference in a graph, eager reference")


@needs_native
def test_inputs_are_not_modified():
    inputs = [[tf.constant(x) for x in xs] for xs in make_inputs("normal")]
    before = [[t.numpy().copy() for t in ts] for ts in inputs]
    layout = {"selectors": ["exact"] * len(SIZES), "quantized": [False] * len(SIZES)}
    select("native", inputs, make_k(), RATIOS, momentum=(0.9, False), **layout)
    assert_same_bits([[t.numpy() for t in ts] for ts in inputs], before, "inputs")


@needs_native
def test_in_place_chain_equals_eager_steps():
    # In a graph the outputs of one op hold the only reference to their memory: the next reuses it.
    grads, residuals, velocities = make_inputs("normal", (5000,))
    options = {"selectors": ["exact"], "quantized": [False], "momentum": (0.9, False)}
    state = (residuals, velocities)
    for _ in range(4):
        result = select("native", (grads, *state), [50], [-1], **options)
        state = (result.residuals, result.velocities)

    from tf_redsync import ops

    @tf.function
    def chain():
        v, u = residuals, velocities
        for _ in range(4):
            s = ops.accumulate_and_select(
                grads, v, u, [50], [-1.0], selectors=["exact"], quantized=[False], momentum=0.9
            )
            v, u = s.residuals, s.velocities
        return s

    ops.set_backend("native")
    try:
        chained = tf.nest.map_structure(lambda t: t.numpy(), chain())
    finally:
        ops.set_backend(None)
    assert_same_bits(chained, result, "chain, steps")


def peak_of(run) -> int:
    """Returns TensorFlow's peak of additional bytes while `run` runs."""
    run()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    result = run()  # noqa: F841 - keeps its outputs alive
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def counts_bytes() -> bool:
    """Returns whether TensorFlow's CPU allocator has statistics."""
    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return False
    return True


@needs_native
@pytest.mark.parametrize("momentum", MOMENTA if DEEP else list(MOMENTA)[-1:])
def test_state_reuses_the_memory_of_gradients(momentum):
    """As in training: the graph computes the gradients, variables hold the old state."""
    from tf_redsync import ops

    if not counts_bytes():
        # oneDNN's allocator has statistics; without AVX-512 TensorFlow uses it only on request.
        name = f"{__file__}::test_state_reuses_the_memory_of_gradients"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"{name}[{momentum}]"]
        assert os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "1", "no statistics with oneDNN either"
        env = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-2000:]
        return
    size = 1 << 20  # 4 MiB
    factor, nesterov = MOMENTA[momentum]
    grads, residuals, velocities = make_inputs("normal", (size,))
    old = [tf.Variable(x) for x in (residuals + velocities)[: 2 if factor else 1]]
    source = tf.Variable(grads[0])

    def step(keep):
        @tf.function
        def run():
            grad = 2.0 * source
            selection = ops.accumulate_and_select(
                [grad], [old[0]], old[1:], [1000], [-1.0], selectors=["exact"],
                quantized=[False], momentum=factor, nesterov=nesterov,
            )  # fmt: skip
            return (selection, grad) if keep else selection

        return run

    ops.set_backend("native")
    try:
        reused, kept = step(False), step(True)
        states = 2 if factor else 1
        assert states <= peak_of(reused) / (4 * size) < states + 0.5
        assert states + 1 <= peak_of(kept) / (4 * size)
        selection, grad = kept()
        assert_same_bits(
            tf.nest.map_structure(lambda t: t.numpy(), reused()),
            tf.nest.map_structure(lambda t: t.numpy(), selection),
            "reused, kept",
        )
        np.testing.assert_array_equal(grad, 2.0 * grads[0])  # their memory was not overwritten
        np.testing.assert_array_equal(old[0], residuals[0])
    finally:
        ops.set_backend(None)


@needs_native
@loop("backend", ["native", "tensorflow"])
@loop(
    ("change", "text"),
    [
        ({"k": [0, 3]}, "`k` must be in"),
        ({"k": [1, 5000]}, "`k` must be in"),
        ({"k": [-1, 3]}, "`k` must be in"),
        ({"ratios": [0.5]}, "ratios"),
        ({"side": 0}, "`side` must be"),
    ],
)
def test_runtime_errors(backend, change, text):
    inputs = make_inputs("normal", (31, 1000))
    arguments = {"k": [1, 3], "ratios": [-1, -1], "side": 1, **change}
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        select(backend, inputs, selectors=["exact"] * 2, quantized=[True, True], **arguments)


@needs_native
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"U": 1}, "U=1"),
        ({"U": 100}, "U=100"),
        ({"momentum": 0.9}, "velocities"),
        ({"velocities": 1}, "velocities"),
        ({"momentum": 0.9, "velocities": 1, "U": 100}, "U=100"),
        ({"momentum": 0.9, "velocities": 1, "nesterov": True}, "nesterov"),
    ],
)
def test_number_of_velocities_rejected_by_the_op(change, text):
    x = [tf.ones([4])]
    arguments = {"U": 0, **change, "velocities": x * change.get("velocities", 0)}

    def run():
        return native.load().redsync_accumulate_and_select(
            grads=x, residuals=x, k=[1], ratios=[-1.0], scale=1.0, side=1, search=True,
            selectors=["exact"], quantized=[False], **arguments,
        )  # fmt: skip

    for call in (run, tf.function(run)):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
            call()


def test_wrong_length_of_k():
    inputs = make_inputs("normal", (31, 1000))
    with pytest.raises(ValueError, match="`k` and `quantized` must have one entry per tensor"):
        select(
            "tensorflow",
            inputs,
            [1, 3, 4],
            [-1, -1],
            selectors=["exact"] * 2,
            quantized=[True, True],
        )


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "tensorflow"])
def test_static_length_of_message(backend):
    from tf_redsync import ops

    x = [tf.zeros([3, 4])]
    options = {"selectors": ["threshold"], "quantized": [False]}

    @tf.function(input_signature=[tf.TensorSpec([1], tf.int32)])
    def dynamic(k):
        message = ops.accumulate_and_select(x, x, [], k, [-1.0], **options).message
        assert message.shape.as_list() == [None]
        return message

    @tf.function
    def static():
        message = ops.accumulate_and_select(x, x, [], [9], [-1.0], **options).message
        assert message.shape.as_list() == [1 + 1 + 2 * 9]
        return message

    ops.set_backend(backend)
    try:
        assert static().shape == dynamic(tf.constant([9])).shape
    finally:
        ops.set_backend(None)
