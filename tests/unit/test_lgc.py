"""LGC: autoencoder, stage 2, shares, stages in a program, rates, bad input."""

import re

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from benchmarks.loopback_workers import first_steps
from benchmarks.methods.digits_task import Digits
from benchmarks.methods.digits_training import Training
from tests.conformance.families.lgc import SMALL
from tests.loops import loop
from tests.oracle.lgc import Network
from tests.oracle.sparse import MemoryOracle, top_k_by_layer
from tf_redsync import codings
from tf_redsync.contrib.lgc.autoencoder import Autoencoder, loss_gradient
from tf_redsync.contrib.lgc.method import SelectionSizes, at_positions_of
from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.exchange.requests import AllGather, AllReduce
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.ops.codecs import Positions
from tf_redsync.step.changing_steps import ChangingSteps
from tf_redsync.step.exchange_schedule import Inputs

SHAPES = ((), (0, 3), (40, 30), (7, 5, 9), (300, 2))
SPECS = tuple(TensorSpec(f"v{i}", s, position=i) for i, s in enumerate(SHAPES))
both = pytest.mark.parametrize("variant", ["ring", "server"])


def lgc(**options):
    return rs.contrib.LGC(
        **{"density": 0.1, "innovation": 0.01, "dense_ends": False, **SMALL, **options}
    )


def draw(seed, workers, shapes=SHAPES):
    """Returns gradients `[worker][tensor]` with a common component."""
    rng = np.random.default_rng(seed)
    common = [rng.standard_t(3, s) for s in shapes]
    return [[np.float32(c + rng.standard_normal(c.shape)) for c in common] for _ in range(workers)]


def constants(arrays):
    return tf.nest.map_structure(tf.constant, arrays)


def vector(tensors):
    return np.concatenate([np.float64(t).reshape(-1) for t in tensors])


def train(method, phase, steps, workers=3, specs=SPECS):
    """Yields gradients, old states and the result of every step."""
    layout = BucketLayout(specs, workers)
    states = loopback.initial_states(method, layout)
    for number in range(steps):
        grads = draw([number, workers], workers, [s.shape for s in specs])
        step = loopback.run_step(method, layout, constants(grads), states, number, phase)
        yield grads, states, step
        states = step.states


# ------------------------------------------------------------------------------- autoencoder


@pytest.mark.parametrize("innovation", [False, True])
@pytest.mark.parametrize("widths", [SMALL, {**SMALL, "channels": (3,), "decoder_channels": (2,)}])
def test_autoencoder_equals_convolutions_in_numpy(innovation, widths):
    widths = {**widths, "code_channels": 1}
    model = Autoencoder(**widths, innovation=innovation)
    rng = np.random.default_rng(0)
    parameters = np.float32(rng.standard_normal(model.size))
    network = Network(parameters, *widths.values(), innovation)
    vectors = np.float32(rng.standard_normal((3, 5 * model.stride)))
    codes = model.encode(tf.constant(parameters), tf.constant(vectors))
    for code, x in zip(codes.numpy(), vectors, strict=True):
        np.testing.assert_allclose(code, network.encode(x), rtol=1e-4, atol=1e-3)
    own = rng.standard_normal(vectors.shape).astype(np.float32) if innovation else None
    decoded = model.decode(tf.constant(parameters), codes, own)
    for i, found in enumerate(decoded.numpy()):
        expected = network.decode(np.float64(codes[i]), 0.0 if own is None else own[i])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


def test_autoencoder_of_the_paper():
    """16 values become a code of 4, through 64, 128, 256 and 64 channels."""
    model = rs.contrib.LGC().autoencoder
    assert (model.stride, model.padded(1), model.padded(16), model.padded(17)) == (16, 16, 16, 32)
    parameters = model.initial(0)
    codes = model.encode(parameters, tf.zeros([2, 160]))
    assert codes.shape == (2, 10, 4) and model.decode(parameters, codes).shape == (2, 160)
    taps = 3 * (1 * 64 + 64 * 128 + 128 * 256 + 256 * 64) + 64 * 4
    back = 3 * (4 * 32 + 32 * 64 + 64 * 128 + 128 * 32) + 32
    biases = 64 + 128 + 256 + 64 + 4 + 32 + 64 + 128 + 32 + 1
    assert model.size == taps + back + biases
    assert rs.contrib.LGC(variant="server").autoencoder.size == model.size + 1
    # Activations roughly keep their scale.
    x = tf.random.stateless_normal([4, 1600], (0, 1), alg="philox")
    code = model.encode(parameters, x)
    assert 0.3 < np.std(code) < 3
    assert 0.3 < np.std(model.decode(parameters, code)) < 3


def test_initial_parameters_depend_on_the_seed():
    one, again, other = (lgc(seed=s).init(BucketLayout(SPECS, 2))["autoencoder"] for s in (1, 1, 2))
    np.testing.assert_array_equal(one[0], again[0])
    assert not np.array_equal(one[0], other[0])


@both
def test_gradient_matches_finite_differences(variant):
    """Against differences of the formula in numpy, along random directions."""
    model = lgc(variant=variant).autoencoder
    rng = np.random.default_rng(2)
    parameters, vectors = model.initial(0).numpy(), rng.standard_normal((3, 48))
    scales = np.sqrt(np.mean(vectors**2, axis=1))
    x = vectors / scales[:, None]

    def loss(parameters):
        network = Network(parameters, *SMALL.values(), model.innovation)
        codes = np.stack([network.encode(v) for v in x])
        if model.innovation:
            own = np.where(np.abs(x) >= np.sort(np.abs(x))[:, -2:-1], x, 0)
            errors = np.stack([network.decode(codes[1], o) for o in own]) - x
        else:
            mixed = np.tensordot(scales, codes, 1) / scales.sum()
            errors = network.decode(mixed) - vectors.sum(0) / scales.sum()
        pairs = np.mean([np.mean((a - b) ** 2) for a in codes for b in codes])
        return 0.5 * np.mean(errors**2) + 0.5 * pairs

    inputs = tf.constant(parameters), tf.constant(vectors, tf.float32), tf.constant(1)
    found = np.float64(loss_gradient(model, *inputs, innovation=2))
    direction = rng.standard_normal((8, model.size))
    slopes = [
        (loss(parameters + 1e-5 * d) - loss(np.float64(parameters) - 1e-5 * d)) / 2e-5
        for d in direction
    ]
    norm = np.linalg.norm(found)
    assert norm <= 1 + 1e-5
    # Clipped to norm 1: the same direction with one factor.
    factors = np.array(slopes) / (direction @ found)
    np.testing.assert_allclose(factors, factors[0], rtol=2e-3)
    assert factors[0] >= 1 - 1e-3 and (norm > 1 - 1e-5 or factors[0] < 1 + 1e-3)


def test_values_at_the_leaders_positions():
    """Covers unused slots, different sizes, and positions of the leader alone."""
    shape = SelectionSizes((5, 0, 9), (2, 0, 3), 1, 16)
    indices = [[[1, 4], [4, 0], [0, 1]], [[], [], []], [[0, 3, 8], [3, 0, 0], [0, 2, 8]]]
    counts = tf.constant([[2, 0, 3], [1, 0, 1], [2, 0, 3]])
    at = [tf.reshape(tf.constant(i, tf.int32), [3, -1]) for i in indices]
    values = np.float32([[1, 2, 3, 4, 5], [6, 0, 7, 0, 0], [8, 9, 10, 11, 12]])
    places = shape.places(Positions(at, counts))
    for rank, row in enumerate(values):
        own = {int(p): i for i, p in enumerate(places.at[rank]) if places.used[rank, i]}
        found = at_positions_of(tf.constant(rank), places, tf.constant(values)).numpy()
        for other in range(3):
            expected = np.zeros(5)
            for p, used, v in zip(
                places.at[other].numpy(), places.used[other], values[other], strict=True
            ):
                if used and int(p) in own:
                    expected[own[int(p)]] = v
            np.testing.assert_array_equal(found[other], expected)
        np.testing.assert_array_equal(found[rank], row)


# ------------------------------------------------------------------------------------ stage 2


@both
@pytest.mark.parametrize("workers", [1, 3])
def test_stage_2_is_top_k_with_error_feedback(variant, workers):
    method = lgc(variant=variant)
    reference = MemoryOracle(SHAPES, workers, top_k_by_layer(0.1))
    for grads, old, step in train(method, "training_exchange", 3, workers):
        assert step.finite and [type(r) for r in step.requests] == [AllGather, AllReduce]
        for found, expected in zip(step.totals[-1], reference.step(grads), strict=True):
            np.testing.assert_array_equal(found, expected)
        for state, residuals in zip(step.states, reference.residuals, strict=True):
            for found, expected in zip(state["residual"], residuals, strict=True):
                np.testing.assert_array_equal(found, expected)
        trained = [s["autoencoder"][0].numpy() for s in step.states]
        for parameters in trained:
            np.testing.assert_array_equal(parameters, trained[0])
        moved = np.linalg.norm(trained[0] - old[0]["autoencoder"][0])
        assert 0 < moved <= method.learning_rate * (1 + 1e-5)
        k = sum(max(1, round(0.1 * s.size)) if s.size else 0 for s in SPECS)
        sizes = [int(driver.payload_bytes(r)) for r in step.requests]
        assert sizes == [4 * (1 + len(SPECS) + 2 * k), 4 * method.autoencoder.size]


@both
def test_nonfinite_gradient_in_stage_2_keeps_the_autoencoder(variant):
    method, layout = lgc(variant=variant), BucketLayout(SPECS, 2)
    states, grads = loopback.initial_states(method, layout), draw(0, 2)
    grads[1][3].flat[-1] = np.nan
    step = loopback.run_step(method, layout, constants(grads), states, 0, "training_exchange")
    assert not step.finite and step.states == states


@both
def test_training_lowers_the_residual(variant):
    """For values of a smooth profile, measures the part that the code does not deliver."""
    spec, workers = (TensorSpec("w", (64, 64)),), 2
    method = lgc(variant=variant, learning_rate=0.2, density=0.05)
    layout, rng = BucketLayout(spec, workers), np.random.default_rng(0)
    profile = np.zeros([64, 64])
    profile[:, ::8] = np.sin(np.arange(512) / 9).reshape(64, 8) + 2

    def draw_noisy():
        noisy = [[profile * rng.uniform(0.9, 1.1, (64, 64))] for _ in range(workers)]
        return tf.nest.map_structure(lambda g: tf.constant(g, tf.float32), noisy)

    def left(states):
        grads = draw_noisy()
        total = loopback.run_step(method, layout, grads, states, 0).totals[0][0].numpy()
        wanted = sum(g[0].numpy() for g in grads)[total != 0]
        return np.sum((wanted - total[total != 0]) ** 2) / np.sum(wanted**2)

    empty = loopback.initial_states(method, layout)
    states, first = empty, left(empty)
    run = loopback.traced_step(method, layout, "training_exchange")
    for number in range(150):
        step = run(draw_noisy(), states, number)
        states = [{**s, "residual": e["residual"]} for s, e in zip(step.states, empty, strict=True)]
    assert left(states) < min(0.5 * first, 0.1)


# ------------------------------------------------------------------------------------ stage 3


@both
def test_shares_sum_to_the_total_and_residuals_stay_bounded(variant):
    for grads, old, step in train(lgc(variant=variant), "exchange", 3):
        kept, sums = [], []
        for own, before, after in zip(grads, old, step.states, strict=True):
            sums.append(vector(own) + vector(before["residual"]))
            kept.append(vector(after["residual"]))
            assert np.linalg.norm(kept[-1]) < np.linalg.norm(sums[-1])
        delivered = sum(sums) - sum(kept)
        np.testing.assert_allclose(vector(step.totals[0]), delivered, rtol=0, atol=1e-5)
        assert np.linalg.norm(delivered) > 0


@both
def test_leaders_rotate(variant):
    """One worker's gradient is much larger than the others' and at other positions."""
    workers, spec = 3, (TensorSpec("w", (30, 30)),)
    method, layout = lgc(variant=variant, density=0.01), BucketLayout(spec, workers)
    grads = [[np.zeros((30, 30), np.float32)] for _ in range(workers)]
    for rank, own in enumerate(grads):
        own[0].flat[100 * rank : 100 * rank + 9] = 1 + rank
    for number in range(workers):
        states = loopback.initial_states(method, layout)
        step = loopback.run_step(method, layout, constants(grads), states, number)
        at = np.flatnonzero(step.totals[0][0])
        np.testing.assert_array_equal(at // 100, number)


@both
@pytest.mark.parametrize("shapes", [((),), ((0, 3),), ((0,), (2, 1))])
def test_very_few_elements(variant, shapes):
    specs = tuple(TensorSpec(f"v{i}", s, position=i) for i, s in enumerate(shapes))
    for phase in ("training_exchange", "exchange"):
        for grads, old, step in train(lgc(variant=variant), phase, 1, 3, specs):
            assert step.finite
            put_in = sum(vector(g) + vector(s["residual"]) for g, s in zip(grads, old, strict=True))
            kept = sum(vector(s["residual"]) for s in step.states)
            np.testing.assert_allclose(put_in, vector(step.totals[0]) + kept, rtol=0, atol=1e-5)


@both
def test_zero_gradients_deliver_zero(variant):
    method, layout = lgc(variant=variant), BucketLayout(SPECS, 2)
    grads = [[tf.zeros(s) for s in SHAPES] for _ in range(2)]
    states = loopback.initial_states(method, layout)
    for phase in ("training_exchange", "exchange"):
        step = loopback.run_step(method, layout, grads, states, 1, phase)
        assert step.finite and not vector(step.totals[0]).any()
        assert np.isfinite(step.states[0]["autoencoder"][0]).all()


@both
@pytest.mark.parametrize("indices", [codings.Bitmap(), codings.Cheapest()])
def test_position_codings_change_only_the_bytes(variant, indices):
    plain, coded = (lgc(variant=variant, indices=i) for i in (codings.RawIndices(), indices))
    runs = [list(train(m, "exchange", 1, workers=2)) for m in (plain, coded)]
    for (_, _, one), (_, _, other) in zip(*runs, strict=True):
        for a, b in zip(one.totals[0], other.totals[0], strict=True):
            np.testing.assert_array_equal(a, b)
        assert other.bytes_sent < one.bytes_sent


# -------------------------------------------------------------------------- programs, training


class Log(DryRun):
    """Records the requests."""

    def __init__(self, in_branches):
        super().__init__(2, in_branches)
        self.asked = []

    def all_gather(self, message):
        self.asked.append("gather")
        return super().all_gather(message)

    def all_reduce(self, tensors):
        self.asked.append("reduce")
        return super().all_reduce(tensors)


STAGES = [["reduce"]] * 2 + [["gather", "reduce"]] * 3 + [["reduce"] * 3]


@pytest.mark.deep
@pytest.mark.parametrize(("traced", "in_branches"), [(True, True), (False, True), (False, False)])
def test_stages_by_step(traced, in_branches):
    """Next to a method without stages, whose total may stay sparse and is not delayed."""
    widths = {"channels": (2,), "decoder_channels": (2,), "code_channels": 1}
    method = lgc(dense_steps=2, training_steps=3, indices=codings.RawIndices(), **widths)
    other = rs.TopK(density=0.001)
    pairs = [
        (TensorSpec("a", (40, 50), position=0), other),
        (TensorSpec("b", (20, 30), position=1), method),
    ]
    schedule = ChangingSteps(make_buckets(pairs, 2, 1, sparse_totals=True))
    logs = []

    def step_fn(step):
        network = Log(in_branches)
        buckets = schedule.buckets
        grads = [[tf.ones(s.shape) for s in b.layout.specs] for b in buckets]
        states = [b.method.init(b.layout) for b in buckets]
        outcome = schedule.run(Inputs(grads, states, None, step, network))
        logs.append(network.asked)
        by_method = {type(b.method): r for b, r in zip(buckets, outcome.results, strict=True)}
        (total,), state = by_method[rs.contrib.LGC]
        (sparse,), _ = by_method[rs.TopK]
        left = tf.reduce_sum(tf.abs(state["residual"][0]))
        moved = tf.norm(state["autoencoder"][0] - method.autoencoder.initial(0))
        return tf.math.count_nonzero(total), left, moved, tf.reduce_sum(sparse.values)

    call = tf.function(step_fn) if traced else step_fn
    for number in range(7):
        nonzero, left, moved, sparse = call(tf.constant(number, tf.int64))
        stage = STAGES[min(number, 5)]
        if in_branches and not traced:
            assert sorted(logs[-1]) == sorted([*stage, "gather"])
        assert (nonzero == 600) == (number < 2) and (left == 0) == (number < 2)
        assert (moved > 0) == (2 <= number < 5)
        if number >= 2:  # where another worker leads, this network has no positions
            assert nonzero == (60 if number < 5 or number % 2 == 0 else 0)
        assert sparse == 4  # two elements of two workers


def test_bytes_per_step_are_those_of_the_last_stage():
    spec = TensorSpec("w", (2000, 1000), position=3)
    method = rs.contrib.LGC(indices=codings.RawIndices())
    found = ChangingSteps(make_buckets([(spec, method)], 4)).bytes_per_step(4)
    positions, codes = 16 * (2001 // 3), 4 * (2000 // 16 * 4 + 1)
    assert found == 1.5 * (positions + codes + 4)
    assert 600 < 1.5 * spec.bytes / found < 650
    capacity = codings.Capacity((2_000_000,), (2000,))
    coded = 16 * -(-codings.Cheapest().words(capacity) // 3) + codes + 4  # by default
    assert 1300 < spec.bytes / coded < 1400


@pytest.mark.deep
@both
def test_training_converges(variant):
    """Digits, two workers: the loss falls in the third stage, and bytes match the formula."""
    task = Digits(workers=2)
    method = lgc(
        variant=variant,
        density=0.05,
        dense_steps=5,
        training_steps=25,
        indices=codings.RawIndices(),
    )
    training, losses, steps = Training(task, method, 0.2), [], 130
    for number, rows in enumerate(task.batches(steps)):
        training.step(tf.constant(rows), number)
        if number + 1 in (first_steps(method), steps):
            losses.append(float(task.scores(training.weights)[0]))
    exchange = training.exchange
    assert exchange.skipped == 0
    assert losses[1] < 0.8 * losses[0]
    kernels, biases = (64 * 256, 256 * 128, 128 * 10), 256 + 128 + 10
    k = sum(round(0.05 * n) for n in kernels)
    code, m = 2 * -(-k // 4), round(0.01 * sum(kernels))
    words = [4 * -(-(3 + k) // 3), code + 1, 1]
    if variant == "server":
        words = [4 * -(-(3 + k + code) // 3), 2 + 2 * m]
    payload = exchange.payload - exchange.first_payload
    assert payload == (steps - 30) * 4 * (sum(words) + biases)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TensorSpec("first", (64, 64), position=0), "first variable"),
        (TensorSpec("last", (64, 64), position=5, output_layer=True), "output layer"),
        (TensorSpec("bias", (5000,), position=2), "rank 1"),
        (TensorSpec("small", (31, 33), position=2), "dense_below"),
    ],
)
def test_densely_reduced_tensors(spec, words):
    assert words in rs.contrib.LGC().refuses(spec)
    assert rs.contrib.LGC().refuses(TensorSpec("w", (64, 64), position=2)) is None
    if "dense" not in words and "rank" not in words:
        assert rs.contrib.LGC(dense_ends=False).refuses(spec) is None


@loop(
    ("options", "words"),
    [
        (
            {"variant": "star"},
            "`variant` must be one of ('ring', 'server'). Received: variant='star'",
        ),
        ({"density": 0.0}, "`density` must be in (0, 1]"),
        ({"innovation": 0.0}, "`innovation` must be in (0, 1]"),
        ({"innovation": 2}, "innovation=2"),
        ({"dense_steps": -1}, "`dense_steps` must be an integer >= 0"),
        ({"training_steps": 0}, "`training_steps` must be an integer >= 1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be in (0, 1]"),
        ({"channels": ()}, "`channels` must be a tuple of at least one integer"),
        ({"channels": 64}, "`channels` must be a tuple"),
        ({"channels": (64, 0)}, "`channels` must be an integer >= 1. Received: channels=0"),
        ({"channels": (64, 64)}, "`decoder_channels` must have as many widths as `channels`"),
        ({"code_channels": 16}, "`code_channels` must be less than 16"),
        ({"code_channels": 0}, "`code_channels` must be an integer >= 1"),
        ({"dense_ends": 1}, "`dense_ends` must be True or False"),
        ({"seed": -1}, "`seed` must be an integer >= 0"),
        (
            {"indices": rs.contrib.codings.Bloom()},
            "`indices` must be a lossless coding of positions",
        ),
        ({"indices": "golomb"}, "indices='golomb'"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        rs.contrib.LGC(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rs.Coded(method=rs.contrib.LGC()),
        lambda: rs.HalfPrecision(method=rs.contrib.LGC()),
        lambda: rs.Auto(candidates=(rs.contrib.LGC(),)),
    ],
)
def test_unsupported_combinations(make):
    with pytest.raises(ValueError, match="LGC"):
        make()
