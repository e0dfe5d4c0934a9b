"""RedSync against the numpy oracle, step by step and bitwise."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.deep import DEEP
from tests.loops import loop
from tests.oracle import redsync as oracle
from tf_redsync.exchange import loopback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods import from_config, serialize

SHAPES = [(30, 20), (7, 11), (5,), (40, 33)]
SPECS = tuple(
    TensorSpec(f"v{i}", shape, position=i, output_layer=i == len(SHAPES) - 1)
    for i, shape in enumerate(SHAPES)
)
# 50 steps on the native ops; an eager step of the reference takes a tenth of a second.
STEPS = 50 if rs.ops.backend() == "native" else 11
RAMP = (0.5, 0.2)
VARIANTS = {
    "exact": {"selection": "exact"},
    "trimmed": {"selection": "trimmed"},
    "threshold": {"selection": "threshold"},
    "threshold_no_reuse": {"selection": "threshold", "search_interval": 1},
    "threshold_long_reuse": {"selection": "threshold", "search_interval": 20},
    "auto": {"selection": "auto", "dense_below": 0, "threshold_above": 1000},
    "momentum": {"selection": "exact", "momentum": 0.9},
    "momentum_threshold": {"selection": "threshold", "momentum": 0.9},
    "no_masking": {"selection": "trimmed", "momentum": 0.9, "masking": False},
    "nesterov": {"selection": "exact", "momentum": 0.9, "nesterov": True},
    "nesterov_no_masking": {
        "selection": "threshold", "momentum": 0.9, "nesterov": True, "masking": False,
    },
    "quantized": {"selection": "exact", "quantized": True},
    "quantized_threshold": {"selection": "threshold", "quantized": True, "momentum": 0.5},
    "ramp": {"selection": "exact", "warm_up": rs.ExponentialWarmUp(4, RAMP)},
    "dense_warm_up": {"selection": "threshold", "momentum": 0.9, "warm_up": rs.DenseWarmUp(4)},
    "dense_warm_up_nesterov": {
        "selection": "exact", "momentum": 0.9, "nesterov": True, "warm_up": rs.DenseWarmUp(3),
    },
    "density_one": {"selection": "threshold", "density": 1.0, "momentum": 0.9, "masking": False},
    "masking_by_density": {"selection": "trimmed", "density": 0.1, "momentum": 0.9},
}  # fmt: skip


def make_oracle(options, workers):
    options = {"density": 0.05, **options}
    selection = options.pop("selection")
    selectors = [selection] * len(SHAPES)
    if selection == "auto":
        selectors = ["threshold" if 4 * np.prod(s) > 1000 else "trimmed" for s in SHAPES]
    if options["density"] >= 0.1:
        options.setdefault("masking", False)
    options.pop("dense_below", None)
    options.pop("threshold_above", None)
    warm_up = options.pop("warm_up", None)
    if isinstance(warm_up, rs.DenseWarmUp):
        warm_up = oracle.DenseWarmUp(warm_up.steps)
    elif warm_up is not None:
        warm_up = oracle.ExponentialWarmUp(warm_up.steps_per_stage, warm_up.densities)
    return oracle.RedSyncOracle(
        SHAPES, workers, selectors=selectors, warm_up=warm_up, output_layer=len(SHAPES) - 1,
        **options,
    )  # fmt: skip


def gradients(rng, step, workers):
    """Returns mostly normal values, sometimes rounded, heavy-tailed or zero on one worker."""

    def one(worker, shape):
        g = rng.standard_normal(shape)
        if (step + worker) % 7 == 3:
            g = np.round(2 * g)
        elif (step + worker) % 7 == 5:
            g = rng.standard_t(2, shape)
        elif (step + worker) % 11 == 6:
            g = np.zeros(shape)
        return g.astype(np.float32)

    return [[one(worker, shape) for shape in SHAPES] for worker in range(workers)]


# test_oracles.py has rows with more workers and with one.
SEVERAL = VARIANTS if DEEP else ("trimmed", "quantized_threshold", "dense_warm_up_nesterov")


@loop("name, workers", [(n, w) for n in VARIANTS for w in (1, 2, 3, 4) if w == 2 or n in SEVERAL])
def test_equals_the_oracle(name, workers):
    method = rs.RedSync(**{"density": 0.05, **VARIANTS[name]})
    reference = make_oracle(VARIANTS[name], workers)
    layout = BucketLayout(SPECS, workers)
    states = loopback.initial_states(method, layout)
    rng = np.random.default_rng(workers)
    for number in range(STEPS if workers == 2 and (DEEP or "threshold" in name) else STEPS // 2):
        grads = gradients(rng, number, workers)
        inputs = [[tf.constant(g) for g in worker] for worker in grads]
        phase = "dense_exchange" if number < method.sync_schedule.warm_up_steps else "exchange"
        step = loopback.run_step(method, layout, inputs, states, number, phase)
        states = step.states
        totals = reference.step(grads)
        assert step.finite and reference.finite
        for found, expected in zip(step.totals[-1], totals, strict=True):
            np.testing.assert_array_equal(found, expected)
        compare_states(states, reference)
        if phase == "exchange":
            np.testing.assert_array_equal(step.requests[0].message, reference.messages[0])


def compare_states(states, reference):
    for worker, state in enumerate(states):
        np.testing.assert_array_equal(state["ratios"][0], reference.ratios[worker])
        for i in range(len(SHAPES)):
            np.testing.assert_array_equal(state["residual"][i], reference.residuals[worker][i])
            if state["velocity"]:
                np.testing.assert_array_equal(state["velocity"][i], reference.velocities[worker][i])


def run_once(method, grads, states=None, step=0, scale=None):
    """Returns one worker's message and state after one step with `grads`, both as arrays."""
    layout = BucketLayout(SPECS, 1)
    ctx = Context(layout, 0, tf.constant(step, tf.int64), scale)
    exchange = method.exchange(grads, states or method.init(layout), ctx)
    request = next(exchange)
    with pytest.raises(StopIteration) as stop:
        exchange.send(request.message[tf.newaxis])
    return request.message.numpy(), stop.value.value


def test_quantized_sides_alternate_and_the_output_layer_sends_values():
    method = rs.RedSync(density=0.05, selection="exact", quantized=True)
    grads = [tf.constant(g) for g in gradients(np.random.default_rng(0), 0, 1)[0]]
    for step in range(4):
        totals, _ = run_once(method, grads, step=step)[1]
        for i, total in enumerate(totals):
            values = total.numpy()[total.numpy() != 0]
            if SPECS[i].output_layer:
                assert len(set(values)) > 1 and (values < 0).any() and (values > 0).any()
            else:
                assert len(set(values)) == 1
                assert (values > 0).all() if step % 2 == 0 else (values < 0).all()


def test_local_clipping_scales_before_accumulation():
    method = rs.RedSync(density=0.05, selection="exact", momentum=0.9, clip_norm=1.5)
    grads = [tf.constant(g) for g in gradients(np.random.default_rng(1), 0, 1)[0]]
    norm = np.sqrt(sum(np.square(g.numpy(), dtype=np.float64).sum() for g in grads))
    scale = method.clip_scale(grads, 4)
    np.testing.assert_allclose(scale, 1.5 / 2 / norm, rtol=1e-6)
    clipped = [scale * g for g in grads]
    found, expected = run_once(method, grads, scale=scale), run_once(method, clipped)
    np.testing.assert_array_equal(found[0], expected[0])
    tf.nest.map_structure(np.testing.assert_array_equal, found[1], expected[1])
    assert rs.RedSync().clip_scale(grads, 4) is None


@pytest.mark.parametrize(
    ("size", "density", "k"),
    [(1000, 0.001, 1), (1499, 0.001, 1), (1500, 0.001, 2), (1, 0.001, 1), (0, 0.5, 0), (7, 1.0, 7)],
)
def test_k(size, density, k):
    assert rs.RedSync(density=density).k(TensorSpec("v", (size,))) == k


@pytest.mark.parametrize(
    ("elements", "selector"), [(1 << 20, "trimmed"), ((1 << 20) + 1, "threshold")]
)
def test_threshold_above_is_in_bytes(elements, selector):
    spec = TensorSpec("v", (elements, 1))
    assert rs.RedSync().selector(spec) == selector
    assert rs.RedSync(selection="exact").selector(spec) == "exact"


def test_initial_state():
    layout = BucketLayout(SPECS, 2)
    state = rs.RedSync(momentum=0.9).init(layout)
    assert [tuple(t.shape) for t in state["residual"]] == SHAPES
    assert [tuple(t.shape) for t in state["velocity"]] == SHAPES
    np.testing.assert_array_equal(state["ratios"][0], -np.ones(4))
    assert rs.RedSync().init(layout)["velocity"] == []


@loop(
    "options",
    [
        {"density": 0.0}, {"density": -0.1}, {"density": 1.5}, {"density": float("nan")},
        {"density": "0.1"}, {"density": None}, {"momentum": -0.9}, {"momentum": 1.0},
        {"masking": "yes"}, {"quantized": 1}, {"selection": "topk"}, {"selection": None},
        {"dense_below": -1}, {"dense_below": 1.5}, {"threshold_above": "4M"},
        {"search_interval": 0}, {"search_interval": 2.0}, {"clip_norm": 0.0},
        {"clip_norm": -1.0}, {"clip_norm": "1"}, {"clip_norm": float("nan")}, {"warm_up": 100},
    ],
)  # fmt: skip
def test_bad_input_names_argument_and_value(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError) as error:
        rs.RedSync(**options)
    assert f"`{name}` must be" in str(error.value)
    assert f"Received: {name}={value!r}" in str(error.value)


def test_sizes_out_of_order():
    with pytest.raises(ValueError) as error:
        rs.RedSync(dense_below=1000, threshold_above=999)
    for word in ("`threshold_above`", "`dense_below`", "threshold_above=999", "dense_below=1000"):
        assert word in str(error.value)


def test_nesterov_without_momentum():
    with pytest.raises(ValueError, match=r"nesterov=True.*momentum=0\.0"):
        rs.RedSync(nesterov=True)


def test_default_masking_depends_on_the_density():
    for make in (rs.RedSync, rs.DGC, rs.CodedTopK):
        found = [make(density=d, momentum=0.9).masks for d in (0.001, 0.0999, 0.1, 1.0)]
        assert found == [True, True, False, False]
        assert [make(density=0.5, masking=m).masks for m in (True, False)] == [True, False]
    ramp = rs.ExponentialWarmUp(9)  # the final density counts
    assert rs.RedSync(warm_up=ramp).masks and not rs.RedSync(density=0.1, warm_up=ramp).masks
    local = [rs.CodedTopK(steps=4, density=0.5, masking=m) for m in (None, True, False)]
    assert [m.sync_schedule.masks_local_momentum for m in local] == [True, True, False]


def test_configs_of_both_versions_load():
    method = rs.RedSync(momentum=0.9)
    config = json.loads(json.dumps(serialize(method)))
    assert config["config"]["masking"] is None and from_config(config) == method
    config["config"]["masking"] = True  # as saved by the first version
    assert from_config(config) == rs.RedSync(momentum=0.9, masking=True)
