"""The RedSync oracle against literal numbers and first principles."""

import numpy as np
import pytest

from tests.loops import loop
from tests.oracle import redsync as oracle

N = 20_000
_RNG = np.random.default_rng(7)
INPUTS = {
    "normal": _RNG.standard_normal(N),
    "laplace": _RNG.laplace(size=N),
    "student_t": _RNG.standard_t(3, N),
    "cauchy": _RNG.standard_cauchy(N),
    "rounded": np.round(4 * _RNG.standard_normal(N)),  # many ties
    "constant": np.full(N, 0.1),
    "zero": np.zeros(N),
    "outlier": np.where(np.arange(N) == 77, 1000.0, _RNG.standard_normal(N)),
    "one_element": np.where(np.arange(N) == 77, 1.0, 0.0),
    "tiny": 1e-30 * _RNG.standard_normal(N),
    "huge": 1e27 * _RNG.standard_normal(N),
}
INPUTS = {name: x.astype(np.float32) for name, x in INPUTS.items()}
by_input = loop("name", INPUTS)


def f32(*values):
    return np.array(values, np.float32)


def select_one(g, v, k, u=None, ratio=-1.0, *, selector="exact", quantized=False, **kwargs):
    """Calls `accumulate_and_select_numpy` for one tensor."""
    message, v, u, ratios = oracle.accumulate_and_select_numpy(
        [g], [v], [] if u is None else [u], [k], f32(ratio),
        selectors=[selector], quantized=[quantized], **kwargs,
    )  # fmt: skip
    return message, v[0], u[0] if u else None, ratios[0]


# ----------------------------------------------------------------------------- literal numbers


@pytest.mark.parametrize("selector", ["exact", "trimmed"])
def test_message_by_hand(selector):
    message, v, _, ratio = select_one(f32(1, -3, 2, 0), f32(0.5, 0, -2.5, 0), 2, selector=selector)
    # v' = [1.5, -3, -0.5, 0]; 1.5 is 0x3FC00000, -3 is 0xC0400000.
    assert message.dtype == np.int32
    assert message.tolist() == [1, 2, 0, 1, 1069547520, -1069547520]
    assert v.tolist() == [0, 0, -0.5, 0]
    assert ratio == -1


def test_momentum_and_masking_by_hand():
    arguments = f32(1, 2, 3), f32(1, 1, 1), 1, f32(2, 0, -4)
    # u' = [2, 2, 1], v' = [3, 3, 2]: the lower index of the two equal elements is sent.
    message, v, u, _ = select_one(*arguments, momentum=0.5)
    assert message.tolist() == [1, 1, 0, 1077936128]
    assert v.tolist() == [0, 3, 2]
    assert u.tolist() == [0, 2, 1]
    _, _, u, _ = select_one(*arguments, momentum=0.5, masking=False)
    assert u.tolist() == [2, 2, 1]


def test_nesterov_by_hand():
    # u' = 0.5 (u + g) = [1.5, 1, -0.5], v' = v + u' + g = [3.5, 4, 3.5].
    _, v, u, _ = select_one(
        f32(1, 2, 3), f32(1, 1, 1), 1, f32(2, 0, -4), momentum=0.5, nesterov=True, masking=False
    )
    assert v.tolist() == [3.5, 0, 3.5]
    assert u.tolist() == [1.5, 1, -0.5]


def test_scale_by_hand():
    _, v, u, _ = select_one(f32(8, 4), f32(0, 1), 1, f32(2, 0), momentum=0.5, scale=0.25)
    # t = [2, 1], u' = [3, 1], v' = [3, 2].
    assert v.tolist() == [0, 2]
    assert u.tolist() == [0, 1]


def test_quantized_by_hand():
    g, zero = f32(4, 1, -8, 2), f32(0, 0, 0, 0)
    message, v, _, _ = select_one(g, zero, 2, quantized=True, side=1)
    assert message.tolist() == [1, 2, 1077936128, 0, 3]  # mean of 4 and 2
    assert v.tolist() == [0, 1, -8, 0]
    message, v, _, _ = select_one(g, zero, 2, quantized=True, side=-1)
    assert message.tolist() == [1, 1, -1056964608, 2, 0]  # one negative element only: -8
    assert v.tolist() == [4, 1, 0, 2]
    message, v, _, _ = select_one(-np.abs(g), zero, 2, quantized=True, side=1)
    assert message.tolist() == [1, 0, 0, 0, 0]
    assert v.tolist() == [-4, -1, -8, -2]


def test_threshold_by_hand():
    g = f32(0, 0, 0, 0, 4, -6, 8, 6)  # mean 3, maximum 8
    zero = np.zeros(8, np.float32)
    message, v, _, ratio = select_one(g, zero, 5, selector="threshold")
    # Ratio 0.5 is threshold 5.5: three elements are above, too few, as at 0.25 (4.25). At 0.125
    # (3.625) there are four, more than 3/4 of 5 and no more than 5.
    assert ratio == 0.125
    assert message[:7].tolist() == [1, 4, 4, 5, 6, 7, 0]
    assert message[7:].view(np.float32).tolist() == [4, -6, 8, 6, 0]
    assert not v.any()


def test_threshold_fallback_by_hand():
    # No threshold leaves 2 of 8, 6, 6: exact top 2, and the next step must search again.
    message, _, _, ratio = select_one(
        f32(0, 0, 0, 0, 4, -6, 8, 6), np.zeros(8, np.float32), 2, selector="threshold"
    )
    assert ratio == -1
    assert message[:4].tolist() == [1, 2, 5, 6] and message.size == 6


@pytest.mark.parametrize(
    ("ratio", "search", "new_ratio", "count"),
    [
        (0.3125, False, 0.3125, 4),  # threshold 46.5: reused
        (0.3125, True, 0.25, 4),  # searched although the old threshold would fit
        (0.0, False, 0.0, 4),  # threshold 31.25
        (0.9, False, 0.25, 4),  # one element above: out of the band, searched
        (-1.0, False, 0.25, 4),
    ],
)
def test_threshold_reuse_by_hand(ratio, search, new_ratio, count):
    g = 10 * f32(0, 0, 0, 0, 5, -6, 8, 6)  # mean 31.25, maximum 80
    g[3] = -0.0
    message, _, _, new = select_one(
        g, np.zeros(8, np.float32), 4, ratio=ratio, selector="threshold", search=search
    )
    assert new == new_ratio
    assert message[1] == count


def test_threshold_is_raised_by_hand():
    # Mean 3.125, maximum 8: three elements above ratio 0.5 (5.56), two above 0.75 (6.78).
    g = f32(0, 0, 0, 0, 4, -6, 8, 7)
    message, _, _, ratio = select_one(g, np.zeros(8, np.float32), 2, selector="threshold")
    assert ratio == 0.75
    assert message[1:4].tolist() == [2, 6, 7]


def test_quantized_threshold_is_always_searched():
    # 0.25 would do (threshold 39, five elements), but the search finds 0.5 (threshold 53) first.
    g = f32(0, 0, 0, 0, 0, 0, 0, 46, 60, 60, 80, 60)
    message, _, _, ratio = select_one(
        g, np.zeros(12, np.float32), 5, ratio=0.25, selector="threshold", search=False,
        quantized=True,
    )  # fmt: skip
    assert message[1] == 4
    assert ratio == -1


def test_density_one_sends_all_nonzero_elements():
    for selector in oracle.SELECTORS:
        message, v, _, ratio = select_one(f32(1, 0, -2), f32(0, 0, 0), 3, selector=selector)
        assert message[:5].tolist() == [1, 2, 0, 2, 0]
        assert message.size == 8
        assert not v.any()
        assert ratio == -1


def test_decode_by_hand():
    a = np.concatenate([[1, 2, 0, 3], oracle.bits([1.5, -2])])
    b = np.concatenate([[1, 1, 3, 0], oracle.bits([0.25, 99])])  # the second slot is unused
    bad = np.concatenate([[0, 2, 0, 1], oracle.bits([7, 7])])
    total = oracle.decode_numpy([a, b, bad], [2], [(2, 2)], selectors=["exact"], quantized=[False])
    assert total[0].tolist() == [[1.5, 0], [0, -1.75]]
    message = np.concatenate([[1, 2], oracle.bits(-0.5), [1, 2]])
    total = oracle.decode_numpy([message] * 2, [2], [(3,)], selectors=["exact"], quantized=[True])
    assert total[0].tolist() == [0, -1, -1]


def test_empty_tensor_and_several_tensors():
    message, v, _, ratios = oracle.accumulate_and_select_numpy(
        [f32(), f32(1, 2).reshape(2, 1)], [f32(), f32(0, 0).reshape(2, 1)], [], [0, 1],
        f32(0.5, 0.5), selectors=["threshold", "threshold"], quantized=[False, True],
    )  # fmt: skip
    assert message.tolist() == [1, 0, 1, oracle.bits(2)[0], 1]
    assert v[0].shape == (0,) and v[1].shape == (2, 1)
    assert ratios.tolist() == [-1, -1]


@loop("value", [np.nan, np.inf, -np.inf])
@loop("where", ["gradient", "residual", "velocity", "overflow"])
def test_nonfinite_values_are_flagged(value, where):
    g, v, u = f32(1, 2, 3), f32(0, 0, 0), f32(0, 0, 0)
    if where == "overflow":  # finite inputs, infinite sum
        g[1] = v[1] = 3e38
    else:
        {"gradient": g, "residual": v, "velocity": u}[where][1] = value
    message, _, _, ratio = select_one(g, v, 1, u, 0.25, selector="threshold", momentum=0.9)
    assert message.tolist() == [0, 0, 0, 0]
    assert ratio == 0.25


# ----------------------------------------------------------------------------- selection


@by_input
@loop("k", [1, 2, 20, 777, N - 1])
def test_trimmed_is_exact(name, k):
    a = np.abs(INPUTS[name])
    expected = np.sort(np.lexsort((np.arange(N), -a))[:k])  # another sort than the oracle's
    expected = expected[a[expected] > 0]
    np.testing.assert_array_equal(oracle.top_k_numpy(a, k), expected)
    np.testing.assert_array_equal(oracle.trimmed_top_k_numpy(a, k), expected)


@by_input
@loop("side", [1, -1])
def test_trimmed_is_exact_on_signed_values(name, side):
    a = np.float32(side) * INPUTS[name]
    chosen = oracle.trimmed_top_k_numpy(a, 20)
    np.testing.assert_array_equal(chosen, oracle.top_k_numpy(a, 20))
    assert chosen.size == min(20, np.count_nonzero(a > 0))


@by_input
@loop("k", [1, 2, 3, 20, 777, N // 2, N - 1])
def test_threshold_is_in_the_band_or_exact(name, k):
    a = np.abs(INPUTS[name])
    chosen, ratio = oracle.threshold_search_numpy(a, k)
    if ratio == -1:
        np.testing.assert_array_equal(chosen, oracle.top_k_numpy(a, k))
    else:
        assert 0.75 * k < chosen.size <= k
        rest = np.delete(a, chosen)
        assert a[chosen].min() > rest.max()  # an upper set
        np.testing.assert_array_equal(
            oracle.select_numpy(a, k, "threshold", ratio, False)[0], chosen
        )
        ratio_after = oracle.select_numpy(4 * a, k, "threshold", ratio, False)[1]
        assert ratio_after == ratio  # follows the scale


def test_threshold_falls_back_where_expected():
    fell_back = {
        n for n, a in INPUTS.items() if oracle.threshold_search_numpy(np.abs(a), 20)[1] < 0
    }
    assert {"constant", "zero", "one_element", "outlier"} <= fell_back
    assert not {"normal", "laplace", "tiny", "huge"} & fell_back


def test_numerical_behavior_of_mean_max_interpolation():
    """Trimming works on light tails only; one outlier leaves the search without a result."""
    n = 1 << 20
    k = round(0.001 * n)
    rng = np.random.default_rng(0)
    normal = np.abs(rng.standard_normal(n)).astype(np.float32)
    laplace = np.abs(rng.laplace(size=n)).astype(np.float32)
    student = np.abs(rng.standard_t(3, n)).astype(np.float32)
    outlier = normal.copy()
    outlier[5] = 1000
    trimmed = {
        name: oracle.trimmed_candidates_numpy(a, k).size / n
        for name, a in [("normal", normal), ("laplace", laplace), ("t3", student), ("one", outlier)]
    }
    assert trimmed["normal"] < 0.02 and trimmed["laplace"] < 0.02
    assert 0.2 < trimmed["t3"] < 0.5 and 0.2 < trimmed["one"] < 0.5  # all above the mean
    for a in (normal, laplace, student):
        chosen, ratio = oracle.threshold_search_numpy(a, k)
        assert ratio > 0 and 0.75 * k < chosen.size <= k
    chosen, ratio = oracle.threshold_search_numpy(outlier, k)
    assert ratio == -1 and chosen.size == k
    assert oracle.trimmed_candidates_numpy(np.full(n, 3, np.float32), k).size == n


# ----------------------------------------------------------------------------- whole algorithm

SHAPES = [(40, 30), (50,), (3, 5, 7), (1,), (30, 20)]


def gradients(steps, workers, shapes=SHAPES, seed=0):
    """Returns [step][worker][variable], with heavier tails than normal."""
    rng = np.random.default_rng(seed)
    draw = lambda: [rng.standard_t(4, s).astype(np.float32) for s in shapes]  # noqa: E731
    return [[draw() for _ in range(workers)] for _ in range(steps)]


def sums(per_worker, i):
    return sum(np.asarray(w[i], np.float64) for w in per_worker)


@loop("workers", [1, 2, 3, 5])
@loop("selector", oracle.SELECTORS)
def test_conservation(workers, selector):
    """The sum over workers of gradient and old residual equals total plus sum of new residuals."""
    selectors = [selector, "dense", selector, selector, selector]
    run = oracle.RedSyncOracle(SHAPES, workers, 0.02, selectors=selectors)
    for grads in gradients(12, workers):
        old = run.residuals
        totals = run.step(grads)
        for i in range(len(SHAPES)):
            before, after = sums(grads, i), np.asarray(totals[i], np.float64)
            if i in run.sparse:
                before, after = before + sums(old, i), after + sums(run.residuals, i)
            np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)
            sent = np.count_nonzero(totals[i])
            most = workers * run.k_at(0)[run.sparse.index(i)] if i in run.sparse else 1e9
            assert 0 < sent <= most


def test_quantized_loses_the_quantization_error():
    """Conservation does not hold: the residual is cleared although only the mean was sent."""
    run = oracle.RedSyncOracle([(100,)], 1, 0.1, selectors=["exact"], quantized=True)
    g = np.arange(-50, 50, dtype=np.float32)
    total = run.step([[g]])[0]
    assert set(total[90:]) == {np.float32(44.5)} and not total[:90].any()
    assert not np.allclose(total + run.residuals[0][0], g)
    assert total.sum() + run.residuals[0][0].sum() == g.sum()  # it holds for each variable's sum
    total = run.step([[0 * g]])[0]  # odd step: the other side
    assert set(total[:10]) == {np.float32(-45.5)} and not total[10:].any()


def test_output_layer_is_not_quantized():
    run = oracle.RedSyncOracle(
        [(4,), (4,)], 1, 0.5, selectors=["exact"] * 2, quantized=True, output_layer=1
    )
    totals = run.step([[f32(1, 3, -9, 0)] * 2])
    assert totals[0].tolist() == [2, 2, 0, 0]
    assert totals[1].tolist() == [0, 3, -9, 0]


@pytest.mark.parametrize("selector", oracle.SELECTORS)
@pytest.mark.parametrize("workers", [1, 3])
def test_density_one_is_the_dense_sum(selector, workers):
    run = oracle.RedSyncOracle(SHAPES, workers, 1.0, selectors=[selector] * len(SHAPES))
    for grads in gradients(3, workers):
        for i, total in enumerate(run.step(grads)):
            expected = np.zeros(SHAPES[i], np.float32)
            for worker in grads:
                expected = expected + worker[i]
            np.testing.assert_array_equal(total, expected)
            assert not any(r[i].any() for r in run.residuals)


@pytest.mark.parametrize("nesterov", [False, True])
def test_density_one_without_masking_is_heavy_ball(nesterov):
    """Sparse and dense variables both apply the velocity of the summed gradient."""
    selectors = ["exact", "dense", "trimmed", "threshold", "dense"]
    run = oracle.RedSyncOracle(
        SHAPES, 2, 1.0, selectors=selectors, momentum=0.9, nesterov=nesterov, masking=False
    )
    buffers = [np.zeros(s) for s in SHAPES]
    for grads in gradients(15, 2):
        totals = run.step(grads)
        for i, total in enumerate(totals):
            g = sums(grads, i)
            buffers[i] = 0.9 * buffers[i] + g  # textbook order
            expected = g + 0.9 * buffers[i] if nesterov else buffers[i]
            np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4)


def test_density_one_with_masking_has_no_momentum():
    """Every element is sent, so every velocity is cleared: plain gradients, as in the paper."""
    run = oracle.RedSyncOracle(SHAPES, 2, 1.0, selectors=["exact"] * len(SHAPES), momentum=0.9)
    for grads in gradients(4, 2):
        for i, total in enumerate(run.step(grads)):
            np.testing.assert_array_equal(total, grads[0][i] + grads[1][i])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_delivers_all_velocity(nesterov):
    """Without masking, total sent + residuals = total applied by dense heavy ball."""
    run = oracle.RedSyncOracle(
        [(30, 20)], 2, 0.05, selectors=["exact"], momentum=0.9, nesterov=nesterov, masking=False
    )
    dense = oracle.RedSyncOracle(
        [(30, 20)], 2, selectors=["dense"], momentum=0.9, nesterov=nesterov
    )
    sent, applied = np.zeros((30, 20)), np.zeros((30, 20))
    for grads in gradients(25, 2, [(30, 20)]):
        sent += run.step(grads)[0]
        applied += dense.step(grads)[0]
    np.testing.assert_allclose(sent + sums(run.residuals, 0), applied, rtol=1e-4, atol=1e-3)
    assert np.abs(sums(run.residuals, 0)).max() > 1


def test_masking_clears_the_velocity_of_sent_elements():
    run = oracle.RedSyncOracle([(4,)], 1, 0.25, selectors=["exact"], momentum=0.5)
    run.step([[f32(4, 3, 0, 0)]])
    assert run.velocities[0][0].tolist() == [0, 3, 0, 0]
    assert run.step([[f32(0, 0, 0, 0)]])[0].tolist() == [0, 4.5, 0, 0]  # 3 + (0.5 * 3)
    assert not run.velocities[0][0].any() and not run.residuals[0][0].any()


def test_nonfinite_step_changes_no_state():
    run = oracle.RedSyncOracle(
        SHAPES, 3, 0.1, selectors=["threshold", "dense"] + ["exact"] * 3, momentum=0.9
    )
    steps = gradients(4, 3)
    twin = oracle.RedSyncOracle(
        SHAPES, 3, 0.1, selectors=["threshold", "dense"] + ["exact"] * 3, momentum=0.9
    )
    for variable in (0, 1):  # a sparse and a dense variable
        assert all(np.isfinite(t).all() for t in run.step(steps[0]))
        bad = [[g.copy() for g in w] for w in steps[1]]
        bad[2][variable].flat[3] = np.nan
        state = run.residuals, run.velocities, run.dense_velocities, run.ratios
        assert not any(t.any() for t in run.step(bad))
        assert not run.finite
        for old, new in zip(
            state, (run.residuals, run.velocities, run.dense_velocities, run.ratios), strict=True
        ):
            assert old is new
    assert run.skipped == 2
    for i in range(2):
        twin.iteration = 2 * i
        twin.step(steps[0])
    run.iteration = twin.iteration = 4
    for a, b in zip(run.step(steps[2]), twin.step(steps[2]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert run.finite


def test_local_clipping_is_global_over_variables_and_scaled():
    run = oracle.RedSyncOracle([(2,), (2,)], 4, 1.0, selectors=["exact", "dense"], clip_norm=1.0)
    small, large = [f32(0.3, 0), f32(0, 0.4)], [f32(3, 0), f32(0, 4)]  # norms 0.5 and 5
    zero = [f32(0, 0), f32(0, 0)]
    totals = run.step([small, large, zero, zero])  # limit: 1 / sqrt(4)
    np.testing.assert_allclose(totals[0], [0.3 + 0.3, 0], rtol=1e-6)
    np.testing.assert_allclose(totals[1], [0, 0.4 + 0.4], rtol=1e-6)
    run.step([[f32(1, np.inf), f32(0, 0)], zero, zero, zero])
    assert not run.finite
    run.step([zero] * 4)
    assert run.finite


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dense_warm_up(momentum):
    run = oracle.RedSyncOracle(
        [(30, 20)], 2, 0.05, selectors=["exact"], momentum=momentum, warm_up=oracle.DenseWarmUp(3)
    )
    dense = oracle.RedSyncOracle([(30, 20)], 2, selectors=["dense"], momentum=momentum)
    for step, grads in enumerate(gradients(5, 2, [(30, 20)])):
        total, expected = run.step(grads)[0], dense.step(grads)[0]
        if step < 3:
            np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
            assert not sums(run.residuals, 0).any()
            if momentum:
                velocity = sums(run.velocities, 0)
                np.testing.assert_allclose(velocity, expected, rtol=1e-5, atol=1e-5)
        else:
            assert np.count_nonzero(total) <= 60
    # The warm-up's velocity continues afterwards, as part of the residual.
    assert sums(run.residuals, 0).any()


def test_exponential_warm_up():
    run = oracle.RedSyncOracle(
        [(2000,)], 1, 0.002, selectors=["exact"], warm_up=oracle.ExponentialWarmUp(2)
    )
    ks = [500, 500, 125, 125, 31, 31, 8, 8, 4, 4, 4]
    assert [run.k_at(step)[0] for step in range(11)] == ks
    sent = [np.count_nonzero(run.step(g)[0]) for g in gradients(11, 1, [(2000,)])]
    assert sent == ks


def test_k_is_rounded_and_at_least_one():
    k = lambda n, density: oracle.RedSyncOracle([(n,)], 1, density, selectors=["exact"]).k_at(0)[0]  # noqa: E731
    assert [k(n, 0.001) for n in (1, 499, 1499, 1500, 2_000_000)] == [1, 1, 1, 2, 2000]
    assert [k(n, 1.0) for n in (1, 7)] == [1, 7]
    assert k(3, 0.5) == 2


def test_dispatch_by_size_in_bytes():
    sizes = [32767, 32768, 1048576, 1048577]
    run = oracle.RedSyncOracle([(n,) for n in sizes], 1)
    assert run.selectors == ["dense", "trimmed", "trimmed", "threshold"]


def test_threshold_is_searched_every_interval_or_out_of_the_band(monkeypatch):
    shape, searched, counts = (100, 100), [], []
    search = oracle.threshold_search_numpy

    def spy(a, k):
        searched.append(run.iteration - 1)
        return search(a, k)

    monkeypatch.setattr(oracle, "threshold_search_numpy", spy)
    run = oracle.RedSyncOracle([shape], 1, 0.01, selectors=["threshold"], search_interval=5)
    for step, grads in enumerate(gradients(15, 1, [shape], seed=3)):
        old_ratio = run.ratios[0][0]
        v = np.abs(run.residuals[0][0] + grads[0][0]).reshape(-1)
        run.step(grads)
        counts.append(int(run.messages[0, 1]))
        fits = old_ratio >= 0 and oracle.in_band(oracle.above_ratio_numpy(v, old_ratio).size, 100)
        assert (step in searched) == (step % 5 == 0 or not fits)
        if step not in searched:
            assert run.ratios[0][0] == old_ratio
    assert len(searched) < 15
    assert min(counts) > 50 and max(counts) < 150 and len(set(counts)) > 5


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("selector", oracle.SELECTORS)
def test_all_elements_are_sent_eventually(selector, quantized):
    """Gradients stop after 5 steps; k = 5 % of the elements per step then empties the residual."""
    run = oracle.RedSyncOracle([(200,)], 2, 0.05, selectors=[selector], quantized=quantized)
    for grads in gradients(5, 2, [(200,)]):
        run.step(grads)
    assert sums(run.residuals, 0).any()
    zero = [[np.zeros(200, np.float32)]] * 2
    for _ in range(80):
        run.step(zero)
    assert not any(r[0].any() for r in run.residuals)
