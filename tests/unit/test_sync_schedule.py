"""Local SGD, SBC, CD-SGD: compression ratios, bad input, unsupported combinations."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tests.oracle.coded import longest_bits
from tests.oracle.quantization import to_bits
from tf_redsync.codings import Capacity, Golomb
from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.step.exchange_schedule import ExchangeSchedule, Inputs
from tf_redsync.step.local_steps import LocalSteps
from tf_redsync.step.perturbed_point import PerturbedPoint
from tf_redsync.step.schedule_choice import for_buckets


def resnet50_shapes():
    """Returns kernels, scales and offsets of ResNet-50 for ImageNet: 25.6 million elements."""

    def block(inputs, width, shortcut):
        convolutions = [(1, 1, inputs, width), (3, 3, width, width), (1, 1, width, 4 * width)]
        if shortcut:
            convolutions.append((1, 1, inputs, 4 * width))
        for shape in convolutions:
            yield from (shape, shape[-1:], shape[-1:])

    yield from ((7, 7, 3, 64), (64,), (64,))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(blocks):
            yield from block(inputs, width, number == 0)
            inputs = 4 * width
    yield from ((2048, 1000), (1000,))


@pytest.mark.parametrize(("p", "bits"), [(0.1, 4.76), (0.01, 8.11), (0.005, 9.11), (0.001, 11.50)])
def test_bits_per_position(p, bits):
    """The paper's numbers, from real codes of random positions, and the worst-case capacity."""
    size = 2_000_000
    k = round(p * size)
    at = np.sort(np.random.default_rng(0).choice(size, k, replace=False))
    coded = Golomb().encode(
        [tf.constant(at, tf.int32)], tf.constant([k]), Capacity((size,), (k,)), tf.constant(0)
    )
    assert int(coded.counts[0]) == int(coded.words[0]) == k
    low, longest = min((longest_bits(size, k, b) for b in range(31)), key=sum)
    low_words = -(-low // 32)
    assert coded.words.shape == [1 + low_words + -(-longest // 32)]
    bitmap = to_bits(coded.words.numpy()[1 + low_words :])
    used = low + np.flatnonzero(bitmap)[-1] + 1
    assert used / k == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize(("number", "times"), [(1, 2600), (2, 3730), (3, 37300)])
def test_sbc_rates_on_resnet50(number, times):
    """Bytes of a real message with all tensors compressed, as in the paper, against float32."""
    method = rs.SBC.preset(number, dense_below=0)
    specs = tuple(TensorSpec(f"{i}", s, position=i) for i, s in enumerate(resnet50_shapes()))
    elements = sum(s.size for s in specs)
    assert elements == 25_557_032
    draw = np.random.default_rng(number).standard_normal
    grads = [tf.constant(draw(s.shape, np.float32)) for s in specs]
    layout = BucketLayout(specs, 1)
    step = loopback.run_step(method, layout, [grads], [method.init(layout)], 0)
    (request,) = step.requests
    rate = 4 * elements * method.steps / int(driver.payload_bytes(request))
    assert times <= rate < 1.02 * times
    sent = sum(int(np.count_nonzero(t)) for t in step.totals[0])
    assert sent >= method.density * elements


def test_equally_spaced_positions_are_sent_in_full():
    """8 or 9 bits each; random positions take 8.11 on average."""
    size, k = 640_000, 6_400
    gradient = np.full(size, 1e-6, np.float32)
    at = np.cumsum(np.tile([65, 129], k // 2)) - 1
    assert at[-1] < size and at.size == k
    gradient[at] = 1.0
    layout = BucketLayout((TensorSpec("x", (size,)),), 1)
    method = rs.SBC(density=0.01, dense_below=0)
    step = loopback.run_step(method, layout, [[tf.constant(gradient)]], [method.init(layout)], 0)
    total, residual = np.array(step.totals[0][0]), np.array(step.states[0]["residual"][0])
    np.testing.assert_allclose(total + residual, gradient, atol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(total), at)


def test_one_sign_per_tensor():
    spec = TensorSpec("x", (1000,))
    gradient = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    gradient[:3] = -9.0
    layout, method = BucketLayout((spec,), 1), rs.SBC(density=0.01, dense_below=0)
    step = loopback.run_step(method, layout, [[tf.constant(gradient)]], [method.init(layout)], 0)
    total = np.array(step.totals[0][0])
    assert np.count_nonzero(total) == 10 and len(set(total[total != 0])) == 1
    assert (total[:3] < 0).all()


# --------------------------------------------------------------------------- programs, policies


def program(method, workers=2):
    spec = TensorSpec("x", (64, 64))
    return for_buckets(make_buckets([(spec, method)], workers), workers)


def test_programs_follow_from_the_methods():
    assert type(program(rs.RedSync())) is ExchangeSchedule
    assert type(program(rs.SBC(steps=7))) is LocalSteps and program(rs.SBC(steps=7)).steps == 7
    assert type(program(rs.CDSGD())) is PerturbedPoint and program(rs.CDSGD()).delay == 1
    assert type(program(rs.SBC(), workers=1)) is ExchangeSchedule  # one worker has no peers


class Recorder(DryRun):
    """Records the messages."""

    def __init__(self, workers):
        super().__init__(workers, in_branches=False)
        self.sent = []

    def all_gather(self, message):
        self.sent.append(message)
        return super().all_gather(message)


def ancestors(tensor) -> set:
    """Returns the operations from which a graph tensor is computed."""
    found, waiting = set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [t.op for t in op.inputs] + list(op.control_inputs)
    return found


@pytest.mark.parametrize("method", [rs.CDSGD(full_every=4, warm_up=None), rs.contrib.TwoBit()])
def test_cd_sgd_sends_values_known_before_the_step(method):
    """The network then works during the backward pass; 2-bit codes must wait for the gradients."""
    runs, network = program(method), Recorder(2)
    (bucket,) = runs.buckets
    with tf.Graph().as_default():
        gradient = tf.compat.v1.placeholder(tf.float32, [64, 64])
        step = tf.compat.v1.placeholder(tf.int64, [])
        state, _ = runs.init(bucket)
        runs.run(Inputs([[gradient]], [state], None, step, network))
        waits = [gradient.op in ancestors(message) for message in network.sent]
    assert waits == [not method.sync_schedule.delay]


def test_flush_delivers_delayed_gradients_with_the_residuals():
    shape = (64, 64)
    state = {"residual": [tf.fill(shape, 2.0)], "pending": [tf.fill(shape, 3.0)]}
    outcome = program(rs.CDSGD(full_every=4)).flush([state], DryRun(2))
    (((total,), new),) = outcome.results
    np.testing.assert_array_equal(total, np.full(shape, 5.0))
    for name in state:
        np.testing.assert_array_equal(new[name][0], np.zeros(shape))


def test_bytes_per_step_are_means_over_a_round():
    assert program(rs.LocalSGD(steps=8)).bytes_per_step(2) == 4 * 4096 / 8
    codes = 4 * (1 + 1 + 2 * 4096 // 32)
    assert program(rs.CDSGD(full_every=4)).bytes_per_step(2) == (3 * codes + 4 * 4096) / 4


@loop(
    ("make", "words"),
    [
        (lambda: rs.LocalSGD(steps=0), "`steps` must be an integer >= 1. Received: steps=0"),
        (lambda: rs.SBC(steps=2.5), "steps=2.5"),
        (lambda: rs.SBC(density=0.0), "`density` must be in"),
        (lambda: rs.SBC(masking=1), "`masking` must be True or False"),
        (lambda: rs.SBC.preset(4), "`number` must be 1, 2 or 3. Received: number=4"),
        (lambda: rs.CDSGD(full_every=0), "`full_every` must be an integer >= 1"),
        (lambda: rs.CDSGD(local_learning_rate=-0.1), "`local_learning_rate` must be in"),
        (lambda: rs.CDSGD(local_learning_rate=float("inf")), "`local_learning_rate` must be in"),
        (lambda: rs.CDSGD(warm_up=100), "`warm_up` must be None or DenseWarmUp"),
        (
            lambda: rs.Policy(default=rs.SBC(), rules=(rs.Rule(pattern="x", method=rs.CDSGD()),)),
            "the same delay. Received: (local steps, delay) of [(0, 1), (10, 0)]",
        ),
        (
            lambda: rs.Policy(
                default=rs.RedSync(), rules=(rs.Rule(pattern="x", method=rs.LocalSGD()),)
            ),
            "the same number of local steps",
        ),
        (
            lambda: rs.DistributedOptimizer(keras.optimizers.Adam(), rs.CDSGD()),
            "CDSGD moves each worker along its own gradient.*Received: Adam",
        ),
        (
            lambda: rs.DistributedOptimizer(keras.optimizers.SGD(weight_decay=0.1), rs.CDSGD()),
            "weight_decay=0.1",
        ),
        (
            lambda: rs.DistributedOptimizer(keras.optimizers.SGD(use_ema=True), rs.LocalSGD()),
            "`use_ema`",
        ),
    ],
)
def test_bad_input(make, words):
    import re

    with pytest.raises(ValueError, match=words if ".*" in words else re.escape(words)):
        make()


class OwnFtrl(keras.optimizers.Ftrl):
    pass


def addons(*names):
    """Returns a legacy optimizer in wrappers of Addons, from the innermost to the outermost."""
    optimizer = getattr(tf_keras.optimizers.legacy, names[0])(0.1)
    for name in names[1:]:
        optimizer = getattr(rs.addons.load().optimizers, name)(optimizer)
    return optimizer


@pytest.mark.parametrize(
    "method", [rs.LocalSGD(), rs.DiLoCo(), rs.SBC()], ids=["LocalSGD", "DiLoCo", "SBC"]
)
@loop(
    ("make", "name"),
    [
        (keras.optimizers.Ftrl, "Ftrl"),
        (OwnFtrl, "OwnFtrl"),
        (lambda: keras.optimizers.LossScaleOptimizer(OwnFtrl()), "OwnFtrl"),
        (keras.optimizers.ScheduleFreeAdamW, "ScheduleFreeAdamW"),
        (tf_keras.optimizers.Ftrl, "Ftrl"),
        (lambda: addons("Ftrl", "Lookahead"), "Ftrl"),
        (lambda: addons("SGD", "MovingAverage"), "MovingAverage"),
        (lambda: addons("SGD", "SWA", "Lookahead"), "SWA"),
    ],
)
def test_local_steps_reject_weights_computed_from_slots(make, name, method):
    with pytest.raises(ValueError, match=rf"slots.*{type(method).__name__}.*Received: {name}\."):
        rs.DistributedOptimizer(make(), method)
    rs.DistributedOptimizer(make(), rs.Dense())


def test_local_steps_accept_lookahead():
    rs.DistributedOptimizer(addons("SGD", "Lookahead"), rs.LocalSGD())


def test_one_replica_per_process_is_required():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(), rs.LocalSGD())
        variable = tf.Variable(tf.zeros([4]))
        with pytest.raises(ValueError, match="one replica in every process"):
            optimizer.exchange.build([variable])


def test_one_worker_takes_the_steps_of_the_inner_optimizer():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    initial = model.get_weights()

    def train(optimizer):
        model.set_weights(initial)
        model.compile(optimizer, loss="mse")
        x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
        model.fit(x, x.sum(axis=1), shuffle=False, verbose=0)
        return np.concatenate([w.ravel() for w in model.get_weights()])

    expected = train(keras.optimizers.SGD(0.1))
    with pytest.warns(UserWarning, match="one worker"):
        for method in (rs.SBC(), rs.LocalSGD(), rs.CDSGD()):
            found = train(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method))
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=repr(method))
