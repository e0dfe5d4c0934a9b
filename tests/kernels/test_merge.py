"""sparse_merge: native, reference and oracle give equal bits."""

import numpy as np
import pytest
import tensorflow as tf

from tests.deep import DEEP
from tests.kernels.common import assert_same_bits, both, needs_native, on
from tests.kernels.test_golomb import choose
from tests.loops import loop
from tests.oracle.merging import sparse_merge_numpy
from tf_redsync.ops import codecs

BACKENDS = ("native", "tensorflow")
SIZES, SLOTS = (0, 1, 40, 5000), (0, 1, 30, 200)


def make(ranks: int, kind: str, seed: int = 0):
    """Returns blocks of all ranks; unused slots hold garbage."""
    rng = np.random.default_rng(seed)
    counts = np.array(
        [[rng.integers(s // 2, s + 1) for s in SLOTS] for _ in range(ranks)], np.int32
    )
    indices, values = [], []
    for i, (n, s) in enumerate(zip(SIZES, SLOTS, strict=True)):
        rows = [choose(rng, min(n, 3 * s), s) for _ in range(ranks)]
        x = rng.integers(-2, 3, (ranks, s)) if kind == "ties" else rng.normal(size=(ranks, s))
        indices.append(np.array(rows, np.int32).reshape(ranks, s))
        values.append(x.astype(np.float32))
        for row, count in enumerate(counts[:, i]):
            indices[i][row, count:], values[i][row, count:] = -7, np.nan
    return indices, values, counts


def merged(result):
    return [*result[0], *result[1], result[2], *result[3], *result[4], result[5]]


@needs_native
@loop("kind", ["ties", "normal"])
@loop("ranks", [1, 2, 3, 5, 8] if DEEP else [1, 2, 5])
def test_backends_and_oracle_agree(ranks, kind):
    for k in ((0, 0, 0, 0), (0, 1, 7, 100), (3, 2, 500, 5000)):
        blocks = make(ranks, kind, seed=k[2])
        expected = sparse_merge_numpy(*blocks, sizes=SIZES, k=k)
        run = both(lambda: codecs.sparse_merge(*blocks, sizes=SIZES, k=k))  # noqa: B023
        for backend, got in run.items():
            assert_same_bits(merged(got), merged(expected), f"{backend} k={k}")
        for i, size in enumerate(SIZES):  # kept plus dropped is the sum
            total, parts = np.zeros(size, np.float32), np.zeros(size, np.float32)
            for row, value, count in zip(blocks[0][i], blocks[1][i], blocks[2][:, i], strict=True):
                total[row[:count]] += value[:count]
            got = run["native"]
            parts[got.indices[i][: got.counts[i]]] += got.values[i][: got.counts[i]]
            left = got.dropped_counts[i]
            parts[got.dropped_indices[i][:left]] += got.dropped_values[i][:left]
            assert (total == parts).all()


@needs_native
def test_ties_and_cancelling_values():
    """Ties go to the lower index; a sum of 0 is removed; 1e8 + 1 - 1e8 is 0 in this order."""
    indices = [np.array([[0, 3, 5], [0, 3, 4], [3, 5, 6]], np.int32)]
    values = [np.array([[2, 1e8, 1], [-2, 1, -3], [-1e8, 2, 3]], np.float32)]
    run = both(lambda: codecs.sparse_merge(indices, values, [[3], [3], [3]], sizes=[7], k=[2]))
    for got in run.values():
        assert got.indices[0].tolist() == [4, 5] and got.values[0].tolist() == [-3, 3]
        assert got.counts.tolist() == [2] and got.dropped_counts.tolist() == [1]
        assert got.dropped_indices[0].tolist() == [6, *[0] * 8]
        assert got.dropped_values[0].tolist() == [3, *[0] * 8]


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@loop(
    ("where", "at", "value", "names"),
    [
        ("counts", (1, 2), 31, ["count", "tensor 2", "31"]),
        ("counts", (0, 3), -1, ["count", "tensor 3", "-1"]),
        ("indices", (1, 0), -1, ["index", "tensor 2", "-1"]),
        ("indices", (1, 0), 40, ["index", "tensor 2", "40"]),
        ("indices", (1, 5), 0, ["index", "tensor 2", "0", "ascend"]),
        ("values", (1, 3), np.nan, ["value", "tensor 2", "nan"]),
        ("values", (0, 3), -np.inf, ["value", "tensor 2", "-inf"]),
    ],
)
def test_corrupted_block(backend, where, at, value, names):
    indices, values, counts = make(2, "normal")
    {"counts": counts, "indices": indices[2], "values": values[2]}[where][at] = value
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        on(backend, lambda: codecs.sparse_merge(indices, values, counts, sizes=SIZES, k=[1] * 4))
    assert all(name in str(caught.value) for name in names), caught.value


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_mode(backend):
    spec = [tf.TensorSpec([None, None], t) for t in (tf.int32, tf.float32, tf.int32)]

    @tf.function(input_signature=spec)
    def run(indices, values, counts):
        return codecs.sparse_merge([indices], [values], counts, sizes=[40], k=[5])

    indices, values, counts = make(3, "normal")
    expected = sparse_merge_numpy([indices[2]], [values[2]], counts[:, 2:3], sizes=[40], k=[5])
    got = on(backend, lambda: run(indices[2], values[2], counts[:, 2:3]))
    assert_same_bits(merged(got), merged(expected), backend)


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("graph", [False, True])
def test_no_entries(backend, slots, graph):
    def run(indices, values, counts):
        return codecs.sparse_merge([indices], [values], counts, sizes=[40], k=[5])

    merge = tf.function(run) if graph else run
    blocks = tf.zeros([2, slots], tf.int32), tf.zeros([2, slots]), tf.zeros([2, 1], tf.int32)
    got = on(backend, lambda: merge(*blocks))
    assert got.counts.tolist() == [0] and got.dropped_counts.tolist() == [0]
    assert got.values[0].tolist() == [0] * 5 and got.dropped_values[0].tolist() == [0] * 2 * slots


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_shapes(backend):
    indices, values, counts = make(2, "normal")
    wrong = [
        (indices, values, counts[:, :3]),
        (indices, values, counts[:1]),
        (indices, [*values[:3], values[3][:, 1:]], counts),
        ([*indices[:3], indices[3][0]], values, counts),
    ]
    for blocks in wrong:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="hape|imension"):
            on(backend, lambda: codecs.sparse_merge(*blocks, sizes=SIZES, k=[1] * 4))  # noqa: B023


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"indices": [], "values": []}, "`indices` must hold at least one"),
        ({"values": [np.zeros([1, 2], "f")] * 2}, "`values` must have one tensor"),
        ({"k": [-1]}, r"`k` must be in \[0, .*k\[0\]=-1"),
        ({"sizes": [3, 4]}, "`sizes` must have one entry"),
    ],
)
def test_bad_arguments(change, text):
    arguments = {
        "indices": [np.zeros([1, 2], np.int32)], "values": [np.zeros([1, 2], np.float32)],
        "counts": [[2]], "sizes": [3], "k": [1], **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        codecs.sparse_merge(**arguments)
