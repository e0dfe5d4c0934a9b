"""The layout of messages: Python and C++ define equal layouts."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import needs_native, on
from tf_redsync import ops
from tf_redsync.ops import message_layout
from tf_redsync.ops.message_layout import MessageLayout, Parts

BACKENDS = [pytest.param("native", marks=needs_native), "tensorflow"]
HEADER = pathlib.Path(__file__).parents[2] / "custom_ops" / "core" / "message_layout.h"
X = [np.array([0.0, -5.0, 0.0, 1.5, 4.0], np.float32), np.array([2.0, -7.0, 4.0], np.float32)]
ZEROS = [np.zeros_like(x) for x in X]
LAYOUT = MessageLayout((3, 3), (False, True))


def bits(values):
    return np.float32(values).view(np.int32).tolist()


# Flag; count, positions and values; count, mean and positions.
MESSAGE = [1, 3, 1, 3, 4, *bits([-5.0, 1.5, 4.0]), 2, *bits([3.0]), 0, 2, 0]


def selected(k=LAYOUT.capacities):
    return ops.accumulate_and_select(X, ZEROS, [], k, selectors="exact", quantized=[False, True])


def test_constants_match_the_native_ops():
    found = dict(re.findall(r"constexpr int64_t k(\w+)Words = (\d+);", HEADER.read_text()))
    assert {name.upper() + "_WORDS": int(words) for name, words in found.items()} == {
        name: words for name, words in vars(message_layout).items() if name.endswith("_WORDS")
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_selected_elements_follow_the_layout(backend):
    chosen = on(backend, selected)
    assert chosen.message.tolist() == MESSAGE
    assert chosen.layout == LAYOUT and LAYOUT.words == len(MESSAGE)


def test_split_and_join_a_message():
    rows = tf.constant([MESSAGE, MESSAGE, [0] * len(MESSAGE)])
    parts = LAYOUT.split(rows)
    assert parts.flags.numpy().tolist() == [[1], [1], [0]]
    assert parts.counts.numpy().tolist() == [[3, 2], [3, 2], [0, 0]]
    assert parts.indices[0][0].numpy().tolist() == [1, 3, 4]
    assert parts.indices[1][1].numpy().tolist() == [0, 2, 0]
    assert parts.values[0][0].numpy().tolist() == [-5.0, 1.5, 4.0]
    assert parts.values[1].numpy().tolist() == [[3.0], [3.0], [0.0]]
    np.testing.assert_array_equal(LAYOUT.join(parts), rows)
    np.testing.assert_array_equal(LAYOUT.join(LAYOUT.split(rows[0])), MESSAGE)


def test_every_bit_is_preserved():
    layout, odd = MessageLayout.of([4]), [2**31 - 1, -(2**31), 0x7F800001, 1]  # NaN, -0, NaN
    message = tf.constant([1, 4, -1, -(2**31), 7, 2**31 - 1, *odd])
    np.testing.assert_array_equal(layout.join(layout.split(message)), message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_capacities(backend):
    @tf.function(input_signature=[tf.TensorSpec([2], tf.int32)])
    def step(k):
        chosen = selected(k)
        assert not chosen.layout.is_static
        joined = chosen.layout.join(chosen.layout.split(chosen.message))
        totals = ops.decode(joined[tf.newaxis], chosen.layout, X)
        return chosen, joined, totals, chosen.layout.words

    for k in ((3, 3), (2, 1)):
        chosen, joined, totals, words = on(backend, lambda: step(tf.constant(k)))  # noqa: B023
        np.testing.assert_array_equal(joined, chosen.message)
        assert words == len(joined) == MessageLayout.of(k, LAYOUT.quantized).words
        assert chosen.layout.capacities == k
        for total, expected in zip(totals, on(backend, lambda: sums(k)), strict=True):  # noqa: B023
            np.testing.assert_array_equal(total, expected)


def sums(k):
    chosen = selected(k)
    return ops.decode(chosen.message[tf.newaxis], chosen.layout, X)


def test_known_sizes_are_static():
    assert MessageLayout.of(tf.constant([3, 3]), [False, True]) == LAYOUT
    assert MessageLayout.of(np.array([3, 3])).quantized == (False, False)
    graph = tf.function(lambda: selected(tf.constant(LAYOUT.capacities)))()
    assert graph.layout == LAYOUT
    assert len(tf.nest.flatten(graph)) == 1 + 2 + 1  # a static layout is not a tensor


def test_errors():
    with pytest.raises(
        ValueError, match="`k` and `quantized` must have one entry per tensor.* 2 .* 3 k"
    ):
        MessageLayout.of([1, 2, 3], [True, False])
    with pytest.raises(ValueError, match="`layout` must .* 2 capacities, 1 like"):
        ops.decode(tf.constant([MESSAGE]), LAYOUT, X[:1])


def test_exact_selector_is_the_default():
    grads, scale = [2.0 * x for x in X], 0.5
    short = ops.accumulate_and_select(grads, ZEROS, [], [3, 1], scale=scale)
    long = ops.accumulate_and_select(
        grads, ZEROS, [], tf.constant([3, 1]), tf.fill([2], -1.0), selectors=["exact"] * 2,
        quantized=[False] * 2, scale=scale,
    )  # fmt: skip
    assert short.layout == long.layout == MessageLayout((3, 1), (False, False))
    for a, b in zip(tf.nest.flatten(short), tf.nest.flatten(long), strict=True):
        np.testing.assert_array_equal(a, b)
    assert isinstance(short.layout.split(short.message), Parts)
