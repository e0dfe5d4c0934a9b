"""Buckets: order of the backward pass, sizes, one method per bucket."""

import pytest

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.contrib import LGC
from tf_redsync.exchange.layout import TensorSpec, make_buckets

A, B = rs.Dense(), rs.RedSync()


def buckets(sizes_and_methods, bucket_bytes=1 << 20, workers=2):
    specs = [
        (TensorSpec(f"v{i}", (size,), position=i), method)
        for i, (size, method) in enumerate(sizes_and_methods)
    ]
    return make_buckets(specs, workers, bucket_bytes)


def positions(made):
    return [(b.method, [s.position for s in b.layout.specs]) for b in made]


def test_spec_counts_elements_and_float32_bytes():
    spec = TensorSpec("v", (3, 4, 5), "bfloat16")
    assert (spec.size, spec.bytes) == (60, 240)
    assert TensorSpec("scalar", ()).size == 1
    assert TensorSpec("empty", (0, 7)).bytes == 0


def test_last_layer_first():
    (bucket,) = buckets([(1, A), (2, A), (3, A)], workers=5)
    assert [s.position for s in bucket.layout.specs] == [2, 1, 0]
    assert (bucket.layout.workers, bucket.layout.index) == (5, 0)


def test_methods_do_not_share_a_bucket():
    result = positions(buckets([(1, A), (1, B), (1, A), (1, B)]))
    assert result == [(B, [3, 1]), (A, [2, 0])]


def test_equal_methods_share_a_bucket():
    result = buckets([(1, rs.RedSync(density=0.5)), (1, rs.RedSync(density=0.5))])
    assert len(result) == 1


def test_full_bucket_is_closed_and_comes_first():
    # 10 floats fill a bucket: [3, 2] and [1] are full, [0] is the remainder.
    result = buckets([(1, A), (25, A), (6, A), (4, A)], bucket_bytes=40)
    assert positions(result) == [(A, [3, 2]), (A, [1]), (A, [0])]
    assert [b.layout.index for b in result] == [0, 1, 2]


def test_large_tensor_of_another_method_does_not_close_a_bucket():
    result = buckets([(4, A), (25, B), (4, A), (25, B)], bucket_bytes=40)
    assert positions(result) == [(B, [3]), (B, [1]), (A, [2, 0])]


def test_every_tensor_is_in_one_bucket():
    result = buckets([(i % 5, (A, B)[i % 3 == 0]) for i in range(40)], bucket_bytes=32)
    found = sorted(p for _, group in positions(result) for p in group)
    assert found == list(range(40))


@pytest.mark.parametrize(
    ("method", "bucket_bytes", "expected"),
    [
        (A, 400, [[2], [0], [3, 1]]),  # TensorFlow may compute the biases' gradients last
        (A, 880, [[3, 2, 1, 0]]),  # just large enough for all
        (A, 879, [[2, 0], [3, 1]]),
        (LGC(), 400, [[3, 2, 1, 0]]),  # needs the whole model
    ],
)
def test_biases_do_not_delay_large_tensors(method, bucket_bytes, expected):
    shapes = {"a/kernel": (10, 10), "a/bias": (10,), "b/kernel": (10, 10), "b/bias": (10,)}
    specs = [TensorSpec(n, s, position=i) for i, (n, s) in enumerate(shapes.items())]
    result = make_buckets([(spec, method) for spec in specs], 2, bucket_bytes)
    assert [p for _, p in positions(result)] == expected


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (0.5, [8]),  # 8 tensors of 1/16 MiB: less than the smallest limit
        (2.0, [4, 4]),  # of 1/4 MiB: 1 MiB is the smallest limit
        (8.0, [2, 2, 2, 2]),  # a quarter is 2 MiB
        (128.0, [1] * 8),  # 16 MiB is the largest limit
    ],
)
def test_default_bucket_is_at_most_a_quarter(mib, expected):
    size = int(mib * 2**20) // 4 // 8
    result = buckets([(size, A)] * 8, bucket_bytes=None)
    assert [len(b.layout.specs) for b in result] == expected
    local = buckets([(size, rs.LocalSGD(steps=4))] * 8, bucket_bytes=None)
    assert len(local) == (8 if mib > 64 else 1)  # no backward pass to overlap with


def test_no_tensors_give_no_buckets():
    assert buckets([]) == []


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_bad_bucket_bytes(bucket_bytes):
    with pytest.raises(ValueError, match=rf"`bucket_bytes`.*bucket_bytes={bucket_bytes}"):
        buckets([(1, A)], bucket_bytes=bucket_bytes)


@loop(
    ("name", "shape", "expected"),
    [
        ("dense/kernel", (3, 4), False),
        ("dense/bias", (4,), True),
        ("attention/query/bias", (12, 64), True),
        ("attention/query/bias:0", (12, 64), True),  # tf_keras
        ("gru/gru_cell/bias", (2, 96), True),
        ("layer_normalization/gamma", (7, 9), True),
        ("rms/scale", (7, 9), True),
        ("relative_bias/embeddings", (32, 12), False),
        ("upscale", (7, 9), False),
        ("scale/kernel", (7, 9), False),
    ],
)
def test_biases_and_norms_of_any_rank_are_detected(name, shape, expected):
    spec = TensorSpec(name, shape)
    assert spec.is_bias_or_norm == expected
    for method in (rs.TopK(density=0.01, dense_below=0), rs.PowerSGD(min_compression_rate=0)):
        assert (method.refuses(spec) is not None) == expected
    (output,) = (
        s
        for s in rs.Policy(default=rs.Dense()).mark_output_layer(
            [TensorSpec("first/kernel", (2, 2)), spec]
        )
        if s.output_layer
    )
    assert (output.name == name) != expected
