"""`rs.Muon` against Keras's Muon on reshaped matrices, and the variables left to AdamW."""

import contextlib

import keras
import numpy as np
import pytest

import tf_redsync as rs
from tests.optimizers import has_muon

pytestmark = pytest.mark.skipif(not has_muon(), reason="rs.Muon needs Keras 3.13")
WIDTH, HEADS, SIZE, STEPS = 12, 3, 4, 4
# Kernels of attention, and their matrices [inputs, outputs].
KERNELS = {
    "attention/query/kernel": ((WIDTH, HEADS, SIZE), (WIDTH, HEADS * SIZE)),
    "attention/key/kernel": ((WIDTH, HEADS, 2), (WIDTH, HEADS * 2)),
    "attention/value/kernel": ((WIDTH, HEADS, SIZE), (WIDTH, HEADS * SIZE)),
    "attention/attention_output/kernel": ((HEADS, SIZE, WIDTH), (HEADS * SIZE, WIDTH)),
}


def variable(path, value):
    *layers, name = path.split("/")
    with contextlib.ExitStack() as scopes:
        for layer in layers:
            scopes.enter_context(keras.name_scope(layer))
        return keras.Variable(value, name=name)


def after_steps(optimizer, path, start, gradients):
    weights = variable(path, start)
    optimizer.build([weights])
    for gradient in gradients:
        optimizer.apply([gradient], [weights])
    return np.asarray(weights.numpy())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("path", KERNELS)
def test_attention_kernels_are_matrices(path, nesterov):
    shape, matrix = KERNELS[path]
    generator = np.random.default_rng(1)
    start = generator.normal(size=shape).astype("float32")
    gradients = generator.normal(size=(STEPS, *shape)).astype("float32")
    options = {"learning_rate": 0.03, "nesterov": nesterov, "weight_decay": 0.1}
    found = after_steps(rs.Muon(**options), path, start, gradients)
    expected = after_steps(
        keras.optimizers.Muon(**options),
        "dense/kernel",
        start.reshape(matrix),
        gradients.reshape(STEPS, *matrix),
    )
    np.testing.assert_allclose(found.reshape(matrix), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found - start).max() > 0.01


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", 1.5), ("adam_beta_1", 2.0), ("adam_beta_2", -0.1), ("ns_steps", 0)],
)
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be.*{name}={value}"):
        rs.Muon(**{name: value})


def test_adamw_updates_non_matrices_and_excluded_variables():
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, WIDTH)(inputs)
    x = keras.layers.MultiHeadAttention(HEADS, SIZE, name="last_attention")(x, x)
    x = keras.layers.MultiHeadAttention(HEADS, SIZE, name="attention")(x, x)
    x = keras.layers.Dense(WIDTH)(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(7, name="logits")(x))
    optimizer = rs.Muon(exclude_layers=["logits", "last_attention"])
    optimizer.build(model.trainable_variables)
    by_muon = {
        v.path
        for v, second in zip(model.trainable_variables, optimizer.adam_velocities, strict=True)
        if second is None
    }
    kinds = ("query", "key", "value", "attention_output")
    assert {p for p in by_muon if "attention" in p} == {f"attention/{k}/kernel" for k in kinds}
    assert len(by_muon) == 5 and not any("logits" in p or "embedding" in p for p in by_muon)


def test_save_and_load():
    optimizer = rs.DistributedOptimizer(
        rs.Muon(0.02, exclude_layers=["logits"]), rs.DiLoCo(steps=5)
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(again.inner_optimizer) is rs.Muon
    assert again.inner_optimizer.exclude_layers == ["logits"]
