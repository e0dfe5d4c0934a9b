"""PowerSGD and ACP-SGD: quality of the approximation, published ratios, compressed tensors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange import loopback, traffic
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets, tensor_spec
from tf_redsync.methods.low_rank import matrix_shape
from tf_redsync.step.exchange_schedule import ExchangeSchedule


def best_split(shape):
    """Returns the best rows and columns of all splits of the axes, in numpy."""
    tensor, splits = np.zeros(shape, np.int8), []
    for axes in range(1, tensor.ndim):
        splits.append(tensor.reshape(int(np.prod(shape[:axes])), -1).shape)
    return min(splits, key=sum)


def run(method, grads, steps, specs):
    """Returns the totals of the last of `steps` steps with constant `grads[worker][tensor]`."""
    layout = BucketLayout(specs, len(grads))
    states = loopback.initial_states(method, layout)
    inputs = [[tf.constant(g, tf.float32) for g in worker] for worker in grads]
    history = []
    for number in range(steps):
        step = loopback.run_step(method, layout, inputs, states, number)
        states = step.states
        history.append([np.array(t) for t in step.totals[0]])
    return history, states


@pytest.mark.parametrize("cls", [rs.PowerSGD, rs.ACPSGD])
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (5, 6, 7), (30, 4, 10)])
def test_matrix_of_the_factors_rank_is_recovered(cls, shape):
    """The sum over the workers has rank 3: rank-3 steps find its column space exactly.

    ACP-SGD's even steps search the row space, so the last step is odd.
    """
    rng = np.random.default_rng(1)
    rows, columns = best_split(shape)
    left = rng.standard_normal((rows, 3))
    grads = [[(left @ rng.standard_normal((3, columns))).reshape(shape)] for _ in range(3)]
    spec = TensorSpec("w", shape)
    history, states = run(cls(rank=3, min_compression_rate=0), grads, 8, (spec,))
    delivered = sum(h[0] for h in history)
    wanted = 8 * sum(g[0] for g in grads)
    kept = sum(s["residual"][0].numpy() for s in states)
    np.testing.assert_allclose(delivered + kept, wanted, rtol=0, atol=1e-3)
    assert np.linalg.norm(kept) < 1e-3 * np.linalg.norm(wanted)


@loop("cls", [rs.PowerSGD, rs.ACPSGD])
def test_totals_scale_with_tiny_gradients(cls):
    """The squares of products of two gradients of 1e-12 underflow in float32."""
    method, spec = cls(rank=2, min_compression_rate=0), TensorSpec("w", (20, 30))
    gradient, scale = np.random.default_rng(4).standard_normal(spec.shape), 2.0**-40
    plain, _ = run(method, [[gradient]] * 2, 4, (spec,))
    tiny, _ = run(method, [[scale * gradient]] * 2, 4, (spec,))
    for (expected,), (found,) in zip(plain, tiny, strict=True):
        np.testing.assert_allclose(found / scale, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cls", [rs.PowerSGD, rs.ACPSGD])
@pytest.mark.parametrize("workers", [2, 3])
def test_blocks_keep_small_columns(cls, workers):
    """Singular values differ by 100 with 4 bits: a common scale would lose the small column."""
    rng = np.random.default_rng(3)
    left, _ = np.linalg.qr(rng.standard_normal((256, 3)))
    right, _ = np.linalg.qr(rng.standard_normal((128, 3)))
    matrix = (left * [10.0, 1.0, 0.1]) @ right.T
    method = rs.BlockQuantized(method=cls(rank=3, min_compression_rate=0), bits=4, block=64)
    history, states = run(
        method, [[matrix / workers]] * workers, 30, (TensorSpec("w", (256, 128)),)
    )
    delivered = sum(h[0] for h in history[10:]) / 20
    found = [left[:, i] @ delivered @ right[:, i] for i in range(3)]
    np.testing.assert_allclose(found, [10.0, 1.0, 0.1], rtol=0.3)


@loop(("cls", "rows", "columns"), [(rs.PowerSGD, 3, 0), (rs.PowerSGD, 3, 3), (rs.ACPSGD, 3, 3)])
def test_gradients_after_a_step_without_any_are_sent(cls, rows, columns):
    """The gradient is 0 in one step, and in the first rows and columns in all steps.

    A layer before an output layer of zeros has no gradient in the first step, and inputs such as a
    picture's margins have none in any. The last step of ACP-SGD is even, which is exact here: the
    residual of the odd step before has the gradient's row space.
    """
    rng = np.random.default_rng(5)
    gradient = rng.standard_normal((20, 3)) @ rng.standard_normal((3, 30))
    gradient[:rows], gradient[:, :columns] = 0.0, 0.0
    method, specs = cls(rank=3, min_compression_rate=0), (TensorSpec("w", (20, 30)),)
    layout = BucketLayout(specs, 2)
    states = loopback.initial_states(method, layout)
    for number, factor in enumerate((0.0, 1.0, 1.0)):
        grads = [[tf.constant(factor * gradient, tf.float32)]] * 2
        states = loopback.run_step(method, layout, grads, states, number).states
    for state in states:
        assert np.linalg.norm(state["residual"][0]) < 1e-3 * np.linalg.norm(gradient)


def test_power_iteration_converges_to_the_leading_directions():
    """With constant input, the rank-2 total approaches the best rank-2 approximation."""
    rng = np.random.default_rng(2)
    u, _ = np.linalg.qr(rng.standard_normal((50, 50)))
    v, _ = np.linalg.qr(rng.standard_normal((40, 40)))
    values = np.concatenate([[10, 8], np.full(38, 0.5)])
    matrix = u[:, :40] * values @ v.T
    best = u[:, :2] * values[:2] @ v[:, :2].T

    method, layout = rs.PowerSGD(rank=2), BucketLayout((TensorSpec("w", (50, 40)),), 1)
    state = method.init(layout)
    for number in range(6):  # without error feedback: only the factor is kept
        fresh = {"residual": [tf.zeros([50, 40])], "q": state["q"]}
        grads = [[tf.constant(matrix, tf.float32)]]
        step = loopback.run_step(method, layout, grads, [fresh], number)
        state = step.states[0]
    assert np.linalg.norm(step.totals[0][0] - best) < 0.02 * np.linalg.norm(best)


def test_acp_is_exact_at_full_rank_on_the_sent_side():
    rng = np.random.default_rng(3)
    spec = TensorSpec("w", (12, 12))
    grads = [[rng.standard_normal((12, 12))] for _ in range(4)]
    history, states = run(rs.ACPSGD(rank=12, min_compression_rate=0), grads, 4, (spec,))
    for (total,) in history:
        np.testing.assert_allclose(total, sum(g[0] for g in grads), rtol=0, atol=2e-4)
    for state in states:
        np.testing.assert_allclose(state["residual"][0], 0, atol=2e-4)


def resnet18():
    """Returns ResNet-18's kernel shapes in Keras for 32 x 32 images, and its 1-D elements."""
    shapes, inputs = [(3, 3, 3, 64)], 64
    norms = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for block in range(2):
            shapes += [(3, 3, inputs, width), (3, 3, width, width)]
            norms += 2 * width
            if block == 0 and (stride != 1 or inputs != width):
                shapes.append((1, 1, inputs, width))
                norms += width
            inputs = width
    shapes.append((512, 10))
    return shapes, 2 * norms + 10


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243), (2, 136), (4, 72)])
def test_published_compression_of_resnet_18(rank, ratio):
    """Vogels, Karimireddy, Jaggi (2019), table 3: ratio of elements to elements of the factors."""
    shapes, vectors = resnet18()
    specs = [TensorSpec(f"w{i}", s) for i, s in enumerate(shapes)]
    method = rs.PowerSGD(rank=rank, min_compression_rate=0)
    assert all(method.refuses(s) is None for s in specs)
    everything = sum(s.size for s in specs) + vectors
    sent = sum(method.rank_of(s) * sum(matrix_shape(s)) for s in specs) + vectors
    assert everything == 11_173_962
    assert round(everything / sent) == ratio


def test_compressed_tensors():
    method = rs.PowerSGD(rank=4)
    assert "rank 1" in method.refuses(TensorSpec("bias", (1000,)))
    assert "no elements" in method.refuses(TensorSpec("empty", (0, 5)))
    assert "min_compression_rate" in method.refuses(TensorSpec("small", (16, 16)))  # 256 / 128
    assert method.refuses(TensorSpec("large", (64, 64))) is None
    assert method.describe(TensorSpec("conv", (3, 3, 64, 128))) == "rank 4 of 576 x 128"


@loop(
    ("shape", "matrix"),
    [
        ((768, 12, 64), (768, 768)),  # attention: query, key and value; [in, heads, size]
        ((12, 64, 768), (768, 768)),  # its output
        ((768, 4, 64), (768, 256)),  # keys of grouped queries
        ((7, 7, 3, 64), (147, 64)),
        ((3, 3, 64, 64), (576, 64)),
        ((1, 1, 2048, 512), (2048, 512)),
        ((3, 512, 512), (1536, 512)),  # Conv1D
        ((3, 3, 3, 16, 32), (432, 32)),  # Conv3D
        ((3, 3, 960, 1), (9, 960)),  # depthwise, as [c, 1, 3, 3] of the paper's PyTorch
        ((3, 3, 512, 4), (9, 2048)),  # few outputs
        ((2, 3, 1, 4), (6, 4)),
        ((5,), (1, 5)),
        ((), (1, 1)),
    ],
)
def test_axes_are_split_for_the_shortest_factors(shape, matrix):
    assert matrix_shape(TensorSpec("w", shape)) == matrix
    assert len(shape) < 2 or matrix == best_split(shape)


def keras_specs(layers):
    variables = [v for layer in layers for v in layer.trainable_variables]
    return [tensor_spec(v, i) for i, v in enumerate(variables)]


def factor_bytes(specs, rank):
    """Returns the float32 bytes: r (rows + columns) per compressed tensor plus the dense rest."""
    factors = dense = 0
    for spec in specs:
        name, size = spec.name.rsplit("/", 1)[-1], int(np.prod(spec.shape))
        if name in ("kernel", "embeddings", "depthwise_kernel"):
            rows, columns = best_split(spec.shape)
            r = min(rank, rows, columns)
            if size > 2 * r * (rows + columns):
                factors += r * (rows + columns)
                continue
        dense += size
    return 4 * factors, 4 * dense


@pytest.mark.parametrize("rank", [4, 32])
def test_bytes_of_attention(rank):
    """A layer of BERT-base: query, key, value and output are 768 x 768, their biases dense."""
    attention = keras.layers.MultiHeadAttention(12, 64)
    attention.build((None, 8, 768), (None, 8, 768))
    specs = keras_specs([attention])
    assert {len(s.shape) for s in specs if s.name.endswith("bias")} == {1, 2}
    factors, dense = factor_bytes(specs, rank)
    assert (factors, dense) == (4 * 4 * rank * 2 * 768, 4 * 4 * 768)
    for method, halves in ((rs.PowerSGD(rank=rank), 1), (rs.ACPSGD(rank=rank), 2)):
        assigned = rs.Policy(default=method).assign(specs)
        program = ExchangeSchedule(make_buckets([(a.spec, a.method) for a in assigned], 2))
        assert program.bytes_per_step(2) == factors / halves + dense
        traced = sum(
            traffic.bytes_sent(traffic.dry_run(b.method, b.layout, range(2)))
            for b in program.buckets
        )
        assert traced == factors / halves + dense


def test_bytes_of_mobile_net():
    model = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=10)
    specs = keras_specs([model])
    factors, dense = factor_bytes(specs, 4)
    assigned = rs.Policy(default=rs.PowerSGD(rank=4)).assign(specs)
    program = ExchangeSchedule(make_buckets([(a.spec, a.method) for a in assigned], 2))
    assert factors > 0 and program.bytes_per_step(2) == factors + dense
    low_rank = [a for a in assigned if "q" in a.method.traits.state_kinds]
    assert all(a.spec.name.endswith("kernel") for a in low_rank)


def test_full_rank_of_an_attention_kernel_is_exact():
    rng = np.random.default_rng(5)
    grads = [[rng.standard_normal((6, 2, 4))] for _ in range(3)]
    method = rs.PowerSGD(rank=1000, min_compression_rate=0)
    ((total,), *_), states = run(method, grads, 1, (TensorSpec("query/kernel", (6, 2, 4)),))
    np.testing.assert_allclose(total, sum(g[0] for g in grads), rtol=0, atol=1e-5)
    assert all(np.abs(s["residual"][0]).max() < 1e-5 for s in states)


@loop("cls", [rs.PowerSGD, rs.ACPSGD])
@loop(
    "options",
    [
        {"rank": 0},
        {"rank": 1.5},
        {"min_compression_rate": -1},
        {"min_compression_rate": np.inf},
        {"seed": -1},
        {"seed": "x"},
    ],
)
def test_bad_input(cls, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**options)


def test_bytes_of_an_alternating_method():
    """ACP-SGD sends P [30, 2] in even and Q [50, 2] in odd steps."""
    spec = TensorSpec("w", (30, 50))
    program = ExchangeSchedule(make_buckets([(spec, rs.ACPSGD(rank=2))], 4))
    assert program.bytes_per_step(4) == 2 * 3 / 4 * 4 * (60 + 100) / 2
