"""`BitBudget` chooses the best settings within the budget, by measured compression errors."""

import dataclasses
import itertools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
import tf_redsync.auto
import tf_redsync.config
from benchmarks.accuracy import bit_budget
from tf_redsync.auto.bit_budget import allocate
from tf_redsync.config import from_config, serialize
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.expressions import evaluate
from tf_redsync.network.collectives import PublicCollectives

SHAPES = ((40, 30), (30,), (50, 20), (20, 10))
SPECS = tuple(TensorSpec(f"layer_{i}/kernel", s, position=i) for i, s in enumerate(SHAPES))
STEPS = 3
METHOD = rs.CodedTopK(density=0.03, dense_below=0)


class OneWorker:
    workers = 1


def gradients():
    """Returns dense values in layer 1, few large ones in layer 3, low rank in the last."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        spread = rng.choice([-1.0, 1.0], SHAPES[0])
        few = rng.standard_t(1.5, SHAPES[2])
        product = rng.normal(size=(20, 1)) @ rng.normal(size=(1, 10))
        yield [tf.constant(g, tf.float32) for g in (spread, np.ones(30), few, product)]


def resolved(policy, strategy=None, network=None):
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    return policy.resolve(SPECS, strategy, network or OneWorker(), 1 << 20, lambda method: False)


@pytest.mark.parametrize("seed", range(20))
def test_choice_is_optimal(seed):
    rng = np.random.default_rng(seed)
    errors = [rng.exponential(size=rng.integers(1, 5)).tolist() for _ in range(5)]
    costs = [rng.integers(1, 50, len(row)).astype(float).tolist() for row in errors]
    budget = 1.3 * sum(map(min, costs))
    chosen = allocate(errors, costs, budget)
    sums = {
        choice: (
            sum(e[c] for e, c in zip(errors, choice, strict=True)),
            sum(k[c] for k, c in zip(costs, choice, strict=True)),
        )
        for choice in itertools.product(*(range(len(row)) for row in errors))
    }
    assert sums[tuple(chosen)][1] <= budget
    # Costs that end within a budget unit may be rounded up.
    within = [error for error, cost in sums.values() if cost <= 0.9995 * budget]
    assert sums[tuple(chosen)][0] <= min(within) + 1e-9


def test_replicas_of_one_process(mirrored):
    """Gradients of `strategy.run` have a value for each replica; their mean is measured."""
    strategy = mirrored(2)
    network = PublicCollectives(2)

    def scaled(step):
        return [g * (0.5 + tf.cast(network.rank(), tf.float32)) for g in step]

    def of_replicas():
        for step in gradients():
            yield strategy.run(scaled, (step,))

    def choice(function, *where):
        policy = rs.BitBudget(default=METHOD, bits=0.6, gradients=function)
        return [row.method for row in resolved(policy, *where).rows]

    expected = choice(gradients)
    assert choice(of_replicas, strategy, network) == expected
    assert choice(gradients, strategy, network) == expected


def test_saved_choice_replaces_the_default(mirrored):
    """A model that was loaded from a file has no `gradients`."""
    strategy = mirrored(2)

    def built(function):
        policy = rs.BitBudget(default=METHOD, bits=0.6, gradients=function, output_layer="layer_0")
        with strategy.scope():
            variables = [
                keras.Variable(tf.zeros(s.shape), name=f"layer_{s.position}") for s in SPECS
            ]
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), policy)
            optimizer.build(variables)
        return optimizer.exchange

    def choice(exchange):
        return [(a.spec.output_layer, a.method) for a in exchange.assignments]

    first, again = built(gradients), built(None)
    assert {m for _, m in choice(again)} == {METHOD} != {m for _, m in choice(first)}
    again.restore_worker_states([first.worker_state()])
    assert choice(again) == choice(first)
    assert [marked for marked, _ in choice(again)] == [True, False, False, False]


def test_impossible_budget_raises():
    with pytest.raises(ValueError, match="`bits` is too small.* 3 times"):
        allocate([[0.0, 1.0], [0.5]], [[4.0, 2.0], [4.0]], 2.0)


def test_overflowing_option_is_not_chosen():
    assert allocate([[float("nan"), 1.0, float("inf")]], [[1.0, 2.0, 3.0]], 10.0) == [1]


def test_errors_are_below_any_uniform_setting():
    policy = rs.BitBudget(default=METHOD, bits=0.6, gradients=gradients)
    found = resolved(policy)
    assert found.bits <= 0.6
    methods = [row.method for row in found.rows]
    assert len({m.density for m in methods}) > 1
    chosen = sum(row.error for row in found.rows)
    for method in policy.options:
        uniform = resolved(rs.BitBudget(bits=64.0, candidates=(method,), gradients=gradients))
        if uniform.bits <= 0.6:
            assert chosen <= sum(row.error for row in uniform.rows)
    assert f"{found.bits:.3f} of 0.6 bits" in str(found)
    assert [a.method for a in found.assign(SPECS)] == methods


def test_relative_errors_ignore_variable_scale():
    def smaller():
        for first, *others in gradients():
            yield [0.001 * first, *others]

    def density_of_the_first(function, relative):
        default = rs.TopK(density=0.03, dense_below=0)
        candidates = tuple(dataclasses.replace(default, density=d) for d in (0.01, 0.1))
        policy = rs.BitBudget(
            bits=6.0, candidates=candidates, gradients=function, relative=relative,
            rules=(rs.Rule(pattern="layer_[13]", method=candidates[0]),),
        )  # fmt: skip
        return resolved(policy).rows[0].method.density

    assert density_of_the_first(smaller, True) == density_of_the_first(gradients, True) == 0.1
    assert density_of_the_first(smaller, False) == 0.01


def test_large_budget_has_no_error_and_keeps_rules():
    policy = rs.BitBudget(
        default=rs.PowerSGD(rank=1, min_compression_rate=0),
        bits=40.0,
        gradients=gradients,
        rules=(rs.Rule(pattern="layer_2", method=rs.Dense()),),
    )
    found = resolved(policy)
    assert found.rows[2].method == rs.Dense() and found.rows[2].error == 0.0
    assert found.rows[3].method.rank >= 1 and found.rows[3].error < 1e-3
    assert found.rows[1].bits == 32 * 30  # a vector, which PowerSGD rejects


def test_benchmark_makes_the_same_choice(monkeypatch):
    monkeypatch.setattr(bit_budget, "gradients", lambda training: list(gradients()))
    policy = rs.BitBudget(default=METHOD, bits=0.6)
    expected = resolved(dataclasses.replace(policy, gradients=gradients))
    assert bit_budget.resolved(policy, None, SPECS) == expected


def test_exchange_momentum_is_not_an_error():
    """At density 1 the totals are those of momentum SGD."""
    energy = sum(float(tf.reduce_sum(g * g)) for step in gradients() for g in step)
    for method in (rs.Dense(momentum=0.9), rs.GMC(density=1.0, momentum=0.9, dense_below=0)):
        policy = rs.BitBudget(default=method, candidates=(method,), bits=64.0, gradients=gradients)
        assert sum(row.error for row in resolved(policy).rows) < 1e-9 * energy


def test_rounding_of_a_dense_form_is_an_error():
    """The dense form of `BlockQuantized()` and `HalfPrecision()` is the method itself."""
    found = resolved(rs.BitBudget(default=rs.BlockQuantized(bits=8), bits=9, gradients=gradients))
    # the other tensors have one value
    assert found.rows[2].method.bits == found.rows[3].method.bits == 8
    assert found.rows[2].error > 0 and found.rows[3].error > 0

    def huge():
        yield [1e6 * g for g in next(gradients())]  # overflows float16

    both = rs.HalfPrecision(), rs.Dense()
    found = resolved(rs.BitBudget(bits=64, candidates=both, gradients=huge))
    assert {row.method for row in found.rows} == {rs.Dense()}
    assert not any(row.error for row in found.rows)


def test_settings_do_not_depend_on_the_default():
    """A rank that exceeds a matrix's dimensions does not become a rule."""
    found = [
        resolved(rs.BitBudget(default=rs.PowerSGD(rank=r), bits=8.0, gradients=gradients))
        for r in (1, 32)
    ]
    assert [row.method for row in found[0].rows] == [row.method for row in found[1].rows]
    assert any(isinstance(row.method, rs.PowerSGD) for row in found[1].rows)


def test_default_without_gradients_is_logged(caplog):
    policy = rs.BitBudget(default=rs.TopK(density=0.1))
    assert resolved(policy) is policy
    assert "`gradients`" in caplog.text
    assert {a.method for a in policy.assign(SPECS)} <= {rs.TopK(density=0.1), rs.Dense()}


def test_deserializes_without_importing_its_module(monkeypatch):
    config = serialize(rs.BitBudget(bits=0.5))
    home = rs.BitBudget.__module__
    monkeypatch.delitem(sys.modules, home)
    monkeypatch.setattr(tf_redsync.auto, "bit_budget", None)  # restored after the test
    monkeypatch.delitem(tf_redsync.config._REGISTRY, "BitBudget")
    assert evaluate("BitBudget(bits=0.5)").method.bits == from_config(config).bits == 0.5


def test_config_excludes_only_the_function():
    policy = rs.BitBudget(default=rs.PowerSGD(rank=2), bits=0.4, gradients=gradients)
    again = from_config(serialize(policy))
    assert again == policy and again.gradients is None and again.bits == 0.4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bits": 0.0}, "`bits`"),
        ({"gradients": [1]}, "`gradients`"),
        ({"default": rs.QSGD()}, "`candidates`"),
        ({"candidates": (rs.TopK, )}, "`candidates`"),
        ({"candidates": ()}, "`candidates`"),
        ({"relative": "no"}, "`relative`"),
        ({"candidates": (rs.Dense(momentum=0.9),)}, "momentum"),
        ({"candidates": (rs.LocalSGD(steps=2),), "default": rs.LocalSGD(steps=2)}, "every step"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        rs.BitBudget(**arguments)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: [], "a step at least"),
        (lambda: [[tf.zeros(3)]], "4 trainable"),
        (lambda: [[tf.fill(s, np.nan) for s in SHAPES]], "finite.*layer_0/kernel"),
    ],
)
def test_bad_gradients(made, words):
    with pytest.raises(ValueError, match=words):
        resolved(rs.BitBudget(gradients=made))
