"""CUDA accumulate-and-select: the numpy oracle's bits."""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.gpu.calls import MISALIGNED, is_bfloat16, select
from tests.gpu.inputs import KINDS, assert_same_bits, make_inputs
from tests.loops import loop
from tests.oracle.coded_top_k import bfloat16_numpy, from_bfloat16
from tests.oracle.redsync import above_ratio_numpy, accumulate_and_select_numpy, top_k_numpy

SELECTORS = ("exact", "trimmed", "threshold")
SIZES = (0, 1, 2, 7, 31, 1000, 4097, 8192, 17_001, 40_000)
DENSITIES = (0.001, 0.02, 0.3, 1.0)
MOMENTA = {"none": (0.0, False), "plain": (0.9, False), "nesterov": (0.9, True)}


def make_k(sizes, first=0):
    turns = [DENSITIES[(i + first) % len(DENSITIES)] for i in range(len(sizes))]
    return [min(n, max(1, round(n * d))) for n, d in zip(sizes, turns, strict=True)]


def check(device, inputs, k, ratios, what, *, in_place=False, misalign=0, seed=0, **options):
    grads, residuals, velocities = inputs
    velocities = velocities if options.get("momentum") else []
    ratios = np.asarray(ratios, np.float32)
    arguments = (grads, residuals, velocities, k, ratios)
    got = select(device, *arguments, in_place=in_place, misalign=misalign, seed=seed, **options)
    as_numbers = [from_bfloat16(g) if is_bfloat16(g) else g for g in grads]
    wanted = accumulate_and_select_numpy(
        as_numbers,
        [x.copy() for x in residuals],
        [x.copy() for x in velocities],
        k,
        ratios,
        **options,
    )
    for name, x, y in zip(("message", "residuals", "velocities", "ratios"), got, wanted,
                          strict=True):  # fmt: skip
        assert_same_bits(x, y, (what, name))
    return got


@loop("quantized", [False, True])
@loop("selector", SELECTORS)
@loop("kind", KINDS)
def test_equals_the_oracle(device, kind, selector, quantized):
    """By default two of twelve settings with each kind, and every setting with several kinds."""
    one = list(KINDS).index(kind) + SELECTORS.index(selector) + 3 * quantized
    inputs = make_inputs(kind, SIZES)
    form = {"selectors": [selector] * len(SIZES), "quantized": [quantized] * len(SIZES)}
    ratios = [-1, 0.25, 0.3, 0.5, 0.7, 0.8, 0.6, 0.75, 0.5, 0.4]
    for turn, (name, (momentum, nesterov)) in enumerate(MOMENTA.items()):
        for first in range(len(DENSITIES)):
            if not DEEP and (3 * first + turn - one) % 6:
                continue
            check(
                device, inputs, make_k(SIZES, first), ratios, (name, first), **form,
                momentum=momentum, nesterov=nesterov, masking=turn != 1, scale=np.float32(0.7),
                side=-1 if turn == 2 else 1, search=turn != 0,
                in_place=(False, True, "grads")[(turn + first) % 3],
                misalign=MISALIGNED if first == 1 else 0,
            )  # fmt: skip


def in_bfloat16(inputs, every=2):
    """Returns every second gradient in bfloat16, or all of them."""
    grads = [
        g if i % every else bfloat16_numpy(g).astype(np.uint16) for i, g in enumerate(inputs[0])
    ]
    return [grads, *inputs[1:]]


@pytest.mark.deep
@loop("selector", [*SELECTORS, "fixed"])
@loop("kind", KINDS)
def test_bfloat16_gradients(device, kind, selector):
    """Next to float32 ones; kernels widen them when they read them, and do not modify them."""
    one = list(KINDS).index(kind) + SELECTORS.index(selector) if selector in SELECTORS else 0
    sizes = (0, 1, 7, 31, 8192, 4099, 17_001, 40_003)
    inputs, ratios = make_inputs(kind, sizes), [0.3] * len(sizes)
    form = {"selectors": [selector] * len(sizes), "quantized": [i % 3 == 0 for i in range(8)]}
    for turn, (name, (momentum, nesterov)) in enumerate(MOMENTA.items()):
        if not DEEP and (turn - one) % 3:
            continue
        for first in range(2):
            check(
                device, in_bfloat16(inputs), make_k(sizes, turn), ratios, (name, first), **form,
                momentum=momentum, nesterov=nesterov, scale=np.float32(0.7), search=turn != 0,
                in_place=(False, True, "grads")[(turn + first) % 3], misalign=MISALIGNED * first,
            )  # fmt: skip
    sizes = (300_001, 200_000)
    form = {"selectors": [selector] * 2, "quantized": [False, True]}
    check(device, in_bfloat16(make_inputs(kind, sizes, 1), 1), [300, 50_000], [0.5, 0.5], "large",
          **form, momentum=0.9)  # fmt: skip


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_nonfinite_bfloat16(device, bits):
    for where in (0, 5_000):
        grads, residuals, velocities = in_bfloat16(make_inputs("normal", (5_001,)))
        grads[0][where] = bits
        message, *_ = select(device, grads, residuals, velocities, [50], [-1], momentum=0.9,
                             selectors=["exact"], quantized=[False])  # fmt: skip
        assert not message.any()


@pytest.mark.deep
@loop("selector", SELECTORS)
@loop("kind", KINDS)
def test_many_chunks(device, kind, selector):
    # A predicted threshold, and, if the prediction fails, histograms.
    sizes = (300_001, 200_000)
    one = (list(KINDS).index(kind) + SELECTORS.index(selector)) % 2
    for quantized in (False, True) if DEEP else (bool(one),):
        form = {"selectors": [selector] * 2, "quantized": [quantized] * 2}
        check(device, make_inputs(kind, sizes, 1), [300, 50_000], [-1, -1], quantized, **form)


def test_wrong_prediction_is_detected(device):
    # All large values in one line of 16: if the sample has it, the threshold is far too high.
    n, normal = 33_000, make_inputs("normal", (33_000,), 3)[0][0]
    for rest in (0.0, 1e-3):
        for line in range(40):
            g = rest * normal
            g[16 * line : 16 * line + 16] = 9 + normal[:16]
            inputs = [[g], [np.zeros(n, np.float32)], []]
            for selector in ("exact", "threshold"):
                check(device, inputs, [47], [-1], line, selectors=[selector], quantized=[False])


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_sampled_lines_have_no_effect(device, seed):
    """Sampled lines differ from call to call; the selection among clusters does not."""
    n = 40_000
    inputs = make_inputs("normal", (n, n), 5)
    for grad in inputs[0]:
        grad[:] = 0.0
        grad[12_000:12_064] = np.linspace(1, 2, 64)
    check(device, inputs, [50, 60], [-1, -1], seed, selectors=["exact", "threshold"],
          quantized=[False, False], seed=seed)  # fmt: skip


def test_more_tensors_than_a_batch(device):
    sizes = tuple(range(0, 4000, 97)) + (0, 9000)
    form = {
        "selectors": [SELECTORS[i % 3] for i in range(len(sizes))],
        "quantized": [i % 5 == 0 for i in range(len(sizes))],
    }
    ratios = np.linspace(-1, 1, len(sizes))
    check(device, make_inputs("normal", sizes), make_k(sizes), ratios, "", **form, search=False,
          momentum=0.9)  # fmt: skip


def test_more_ties_than_the_pool_holds(device):
    n, k = 200_000, 100
    for few in (0, 60):  # above the ties
        g = np.full(n, 0.5, np.float32)
        g[n - few :] = 1 + np.arange(few)
        for selector in SELECTORS:
            for quantized in (False, True):
                check(device, [[g], [np.zeros(n, np.float32)], []], [k], [-1], (few, selector),
                      selectors=[selector], quantized=[quantized])  # fmt: skip


@loop("bad", [np.inf, -np.inf, np.nan])
@loop("selector", SELECTORS)
def test_nonfinite_values(device, selector, bad):
    sizes = (31, 0, 100_000)
    for tensor, where in ((0, 30), (2, 0), (2, sizes[2] - 1)):
        inputs = make_inputs("normal", sizes)
        inputs[0][tensor][where] = bad
        message, _, _, ratios = select(
            device, *inputs, [3, 0, 50], [0.25, 0.75, 0.5], momentum=0.9,
            selectors=[selector] * 3, quantized=[False, True, True],
        )  # fmt: skip
        assert not message.any()
        assert_same_bits(ratios, np.float32([0.25, 0.75, 0.5]), where)


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_nonfinite_scale(device, scale):
    message, _, _, _ = select(device, *make_inputs("normal", (5001,)), [50], [-1], momentum=0.9,
                              selectors=["exact"], quantized=[False], scale=scale)  # fmt: skip
    assert not message.any()


def test_overflow_is_not_finite(device):
    inputs = [[np.full(5, 3e38, np.float32)] for _ in range(2)] + [[]]
    message, *_ = select(device, *inputs, [2], [-1], selectors=["exact"], quantized=[False])
    assert not message.any()


def test_velocities_that_are_not_returned(device):
    inputs, options = make_inputs("normal", (5001,)), {"selectors": ["exact"], "quantized": [False]}
    both = [
        select(device, *inputs, [50], [-1], momentum=0.9, masking=False, keep_velocities=keep,
               **options)
        for keep in (True, False)
    ]  # fmt: skip
    assert_same_bits(both[0][:2], both[1][:2], "message, residuals")
    assert len(both[0][2]) == 1 and not both[1][2]


def test_magnitudes_are_below_2_to_the_96(device):
    limit = np.float32(2.0**96)
    for value, sent in ((limit, False), (np.nextafter(limit, np.float32(0)), True)):
        inputs = [[np.full(5, v, np.float32)] for v in (0, -value)] + [[]]
        message, *_ = select(device, *inputs, [2], [-1], selectors=["exact"], quantized=[False])
        assert message[0] == sent


@pytest.mark.parametrize("quantized", [False, True])
def test_denormals_are_zero(device, quantized):
    n = 5000
    g, v = np.full(n, 1e-40, np.float32), np.full(n, -1e-41, np.float32)
    v[7] = 2.0
    message, (residual,), _, _ = select(device, [g], [v], [], [10], [-1], selectors=["exact"],
                                        quantized=[quantized])  # fmt: skip
    index = message[3 if quantized else 2]
    assert message[1] == 1 and index == 7 and not residual.any()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fixed_threshold(device, momentum, quantized):
    # The capacity holds all that reach the threshold, or some (the pool too, or not), or any.
    n, form = 60_000, {"selectors": ["fixed"], "quantized": [quantized]}
    grads, residuals, velocities = make_inputs("normal", (n,), 5)
    velocities = velocities if momentum else []
    v = residuals[0] + (np.float32(momentum) * velocities[0] + grads[0] if momentum else grads[0])
    a = -v if quantized else np.abs(v)
    for threshold, k in ((2.0, n // 2), (2.0, 4000), (0.5, 100), (0.0, 10), (9.0, 5), (1.0, n)):
        above = np.flatnonzero((a >= threshold) & (a > 0))
        chosen = above[top_k_numpy(a[above], k)]
        message, (residual,), _, ratios = select(
            device, grads, residuals, velocities, [k], [threshold], momentum=momentum, side=-1,
            **form,
        )  # fmt: skip
        assert message[0] == 1 and message[1] == chosen.size and ratios[0] == np.float32(threshold)
        first = 3 if quantized else 2
        assert (message[first : first + chosen.size] == chosen).all()
        expected = v.copy()
        expected[chosen] = 0
        assert_same_bits(residual, expected, threshold)
    for bad in (np.nan, -1.0):
        message, *_ = select(device, grads, residuals, velocities, [9], [bad], momentum=momentum,
                             **form)  # fmt: skip
        assert not message.any()


def test_thresholds_equal_the_oracles(device):
    # float64 sums are taken in another order than numpy's: their last bits may differ, but the
    # float32 thresholds, and so the selections, do not.
    n = 20_000
    for seed in range(60):
        inputs = make_inputs("normal", (n,), seed)
        form = {"selectors": ["threshold"], "quantized": [False]}
        message, _, _, ratios = check(device, [*inputs[:2], []], [100 + seed], [-1], seed, **form)
        a = np.abs(inputs[0][0] + inputs[1][0])
        assert ratios[0] < 0 or message[1] == above_ratio_numpy(a, ratios[0]).size


def test_arguments_are_checked(device):
    for n, k in ((10, 0), (10, 11), (0, 1)):
        x = [np.zeros(n, np.float32)]
        with pytest.raises(ValueError, match="invalid"):
            select(device, x, x, [], [k], [-1], selectors=["exact"], quantized=[False])
