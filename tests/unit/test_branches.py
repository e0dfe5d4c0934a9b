"""Branches with many outputs."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tf_redsync.step.branches import BUNDLED, carry, compact_cond, run_on_host


def many(number, offset):
    """Returns a nested structure of tensors of several dtypes, and flags."""
    dtypes = (tf.float32, tf.bfloat16, tf.int64, tf.float16)
    tensors = [tf.cast(tf.fill([i % 3, 2], i + offset), dtypes[i % 4]) for i in range(number)]
    return {"b": tensors[::2], "a": (tensors[1::2], [])}, (tf.constant(offset > 0), [])


@pytest.mark.parametrize("number", [0, 1, BUNDLED, BUNDLED + 1, 5 * BUNDLED])
@pytest.mark.parametrize("traced", [True, False])
def test_returns_the_tensors_of_the_branch(number, traced):
    def run(predicate):
        return compact_cond(predicate, lambda: many(number, 1), lambda: many(number, 0))

    function = tf.function(run, autograph=False) if traced else run
    for predicate, offset in ((True, 1), (False, 0)):
        found, expected = function(tf.constant(predicate)), many(number, offset)
        tf.nest.assert_same_structure(found, expected)
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_shapes_of_both_branches():
    @tf.function(autograph=False)
    def run(predicate):
        (same, other, rank), () = compact_cond(
            predicate,
            lambda: ([tf.zeros([2, 3]), tf.zeros([4]), tf.zeros([0])], ()),
            lambda: ([tf.ones([2, 3]), tf.ones([5]), tf.ones([1, 2])], ()),
        )
        assert same.shape == (2, 3) and other.shape.as_list() == [None]
        assert rank.shape.rank is None
        return same, other, rank

    assert [t.shape for t in run(tf.constant(True))] == [(2, 3), (4,), (0,)]
    assert [t.shape for t in run(tf.constant(False))] == [(2, 3), (5,), (1, 2)]


def test_values_become_tensors():
    @tf.function(autograph=False)
    def run(predicate):
        return compact_cond(
            predicate,
            lambda: ([1.0, np.float32([2, 3])], ()),
            lambda: ([tf.zeros([]), tf.zeros([2])], ()),
        )[0]

    number, vector = run(tf.constant(True))
    assert number == 1.0 and vector.numpy().tolist() == [2.0, 3.0]


@pytest.mark.parametrize("traced", [True, False])
def test_host_calls_do_not_keep_their_object(traced):
    class Sums:
        def __init__(self):
            self.total = 0

        def add(self, number):
            self.total += int(number)

    def called():
        sums = Sums()

        def step():
            run_on_host(sums.add, [3])

        (tf.function(step) if traced else step)()
        assert sums.total == 3
        return weakref.ref(sums)

    alive = called()
    gc.collect()
    assert alive() is None


def test_dtypes_must_be_equal():
    @tf.function(autograph=False)
    def run(predicate):
        one, other = tf.ones([], tf.float32), tf.ones([], tf.float16)
        return compact_cond(predicate, lambda: ([one], ()), lambda: ([other], ()))[0]

    with pytest.raises(TypeError, match="float32 and float16"):
        run(tf.constant(True))


def operations(function):
    """Returns the number of operations of a function of a predicate."""
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([], tf.bool)).graph
    functions = graph.as_graph_def().library.function
    return len(graph.get_operations()) + sum(len(f.node_def) for f in functions)


def test_takes_fewer_operations_than_separate_outputs():
    tensors = [tf.zeros([2])] * 100

    def branch():
        return [t + 1.0 for t in tensors], ()

    plain = operations(lambda p: tf.cond(p, branch, branch))
    assert operations(lambda p: compact_cond(p, branch, branch)) < plain - 2 * len(tensors)


@pytest.mark.parametrize("number", [0, 1, BUNDLED, 5 * BUNDLED + 1])
@pytest.mark.parametrize("traced", [True, False])
def test_carries_tensors_into_a_branch(number, traced):
    def run(predicate):
        with tf.device("CPU:0"):
            values = many(number, 1)
        carried = carry(values)
        return tf.cond(predicate, carried, lambda: tf.nest.map_structure(tf.zeros_like, values))

    function = tf.function(run, autograph=False) if traced else run
    found, expected = function(tf.constant(True)), many(number, 1)
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    for zero in tf.nest.flatten(function(tf.constant(False))):
        assert not np.any(zero.numpy())


def test_carried_tensors_keep_their_identity():
    @tf.function(autograph=False)
    def run(predicate):
        with tf.device("CPU:0"):
            one, other, flag = tf.ones([2]), tf.zeros([2]), ~predicate
        carried = carry([one, flag, one, other, "a leaf"])

        def branch():
            first, second, third, fourth, leaf = carried()
            assert first is third and first is not one and first is not fourth
            assert second is flag and leaf == "a leaf"
            return first + fourth

        return tf.cond(predicate, branch, lambda: one - 1.0)

    assert run(tf.constant(True)).numpy().tolist() == [1.0, 1.0]


def test_a_branch_captures_few_carried_tensors():
    def inputs(carries, device="CPU:0"):
        def run(predicate):
            with tf.device(device):
                tensors = [tf.fill([2], float(i)) for i in range(100)]
            carried = carry(tensors) if carries else lambda: tensors
            return tf.cond(predicate, lambda: tf.add_n(carried()), lambda: tf.zeros([2]))

        graph = tf.function(run).get_concrete_function(tf.TensorSpec([], tf.bool)).graph
        (branch,) = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
        return len(branch.inputs)

    assert inputs(carries=False) == 1 + 100
    assert inputs(carries=True) == 1 + -(-100 // BUNDLED)
    assert inputs(carries=True, device=None) == 1 + 100  # TensorFlow may choose the host


def test_tensors_are_carried_on_their_device():
    def run(predicate):
        with tf.device("GPU:0"):
            tensors = [tf.fill([2], float(i)) for i in range(3)]
        carried = carry(tensors)  # outside of the scope, as in a merge call
        return tf.cond(predicate, lambda: tf.add_n(carried()), lambda: tf.zeros([2]))

    function = tf.function(run, autograph=False)
    definition = function.get_concrete_function(tf.TensorSpec([], tf.bool)).graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    devices = {n.op: n.device for n in nodes if n.op.startswith("Optional")}
    assert devices == dict.fromkeys(("OptionalFromValue", "OptionalGetValue"), "/device:GPU:0")
