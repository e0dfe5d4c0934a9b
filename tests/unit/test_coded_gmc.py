"""CodedGMC: components, message size, training on unequal data, bad arguments."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.unit.test_gmc import excess_loss
from tf_redsync.exchange import driver, loopback, traffic
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

WORKERS, STEPS = 4, 12
SPECS = (TensorSpec("a/kernel", (60, 50), position=0), TensorSpec("b/kernel", (30, 7), position=1))


def train(method, specs=SPECS, steps=STEPS):
    """Returns all totals and message sizes, with the same random gradients for any method."""
    layout, rng = BucketLayout(specs, WORKERS), np.random.default_rng(0)
    states, totals, sizes = loopback.initial_states(method, layout), [], []
    for number in range(steps):
        grads = [
            [tf.constant(rng.standard_t(4, s.shape), tf.float32) for s in specs]
            for _ in range(WORKERS)
        ]
        step = loopback.run_step(method, layout, grads, states, number)
        states = step.states
        totals.append(np.concatenate([np.ravel(t) for t in step.totals[0]]))
        sizes.append([driver.payload_bytes(r) for r in step.requests])
    return np.stack(totals), sizes


def test_equals_gmc_in_a_coded_message(value_bits=3):
    """For matrices, `Coded` around `GMC` sends the same messages."""
    values = rs.codings.SignedLevels(bits=value_bits)
    gmc = rs.GMC(density=0.05, dense_below=0)
    wrapped = rs.Coded(method=gmc, indices=rs.codings.Golomb(), values=values)
    own = rs.CodedGMC(density=0.05, dense_below=0, value_bits=value_bits)
    found, expected = train(own), train(wrapped)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1] == expected[1]
    assert not np.allclose(found[0], train(rs.CodedGMC(density=0.05, momentum=0.0))[0])


def test_payload_formula_matches_the_messages():
    bias = TensorSpec("b/bias", (70,), position=2)
    for method in (rs.CodedGMC(), rs.CodedTopK(), rs.CodedGMC(value_bits=16)):
        (found,) = {tuple(sizes) for sizes in train(method, (*SPECS, bias))[1]}
        layout = BucketLayout((*SPECS, bias), WORKERS)
        assert [size for _, size in method.payloads(layout, 0)] == list(found)
        ((message,),) = traffic.messages(method, layout)
        assert message.sent == pytest.approx((WORKERS - 1) * found[0])


def test_without_momentum_equals_top_k():
    density = {"density": 0.05, "momentum": 0.0}
    own, top_k = train(rs.CodedGMC(**density)), train(rs.CodedTopK(**density))
    np.testing.assert_array_equal(own[0], top_k[0])


@pytest.mark.deep
def test_converges_like_gmc_on_unequal_data():
    """Local momentum, corrected and masked, ends far from the minimum here."""
    sparse = {"density": 0.05, "momentum": 0.9}
    coded = excess_loss(rs.CodedGMC(small_density=None, dense_below=0, **sparse))
    assert coded < 1.5 * excess_loss(rs.GMC(**sparse))
    assert coded < 0.2 * excess_loss(rs.CodedTopK(dense_below=0, **sparse))


@pytest.mark.parametrize(
    "options",
    [{"density": 0.0}, {"momentum": 1.0}, {"value_bits": 7}, {"small_density": 2.0}],
)
def test_bad_input(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.CodedGMC(**options)


def test_momentum_on_both_sides_is_rejected():
    import keras

    with pytest.raises(ValueError, match="momentum is set on both sides"):
        rs.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), rs.CodedGMC())


@pytest.mark.deep
def test_ablation_variants():
    """Without arguments it equals GMC; with them fewer elements are delayed forever."""
    from benchmarks.accuracy.variants import SelectionVariant

    forms = {"density": 0.05, "dense_below": 0}
    expected, _ = train(rs.GMC(**forms), steps=25)
    np.testing.assert_array_equal(train(SelectionVariant(**forms), steps=25)[0], expected)
    first = SPECS[0].size
    # Random gradients have no ties, ages do.
    shuffled = train(SelectionVariant(random_ties=True, **forms), steps=25)[0]
    np.testing.assert_allclose(shuffled, expected, rtol=1e-5, atol=1e-7)
    ages = [SelectionVariant(oldest=0.5, random_ties=ties, **forms) for ties in (False, True)]
    ordered, shuffled = (train(method, steps=5)[0] for method in ages)
    assert (ordered != shuffled).any()
    by_model = train(SelectionVariant(scope="model", **forms), steps=25)[0]
    assert (by_model != 0).sum() == pytest.approx((expected != 0).sum(), rel=0.05)
    never = {(): (expected[:, :first] == 0).all(axis=0).mean()}
    for options in ({"age": 4.0}, {"oldest": 0.5}):
        totals = train(SelectionVariant(**options, **forms), steps=25)[0]
        never[tuple(options)] = (totals[:, :first] == 0).all(axis=0).mean()
    assert never["age",] < 0.7 * never[()] and never["oldest",] < 0.7 * never[()]
