"""Comparison of workers: fingerprints of weights, configurations, and reported differences."""

import json
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tf_redsync.building import libraries
from tf_redsync.cluster import agreement
from tf_redsync.cluster.agreement import differences
from tf_redsync.keras import consistency, momentum
from tf_redsync.ops import native
from tf_redsync.step import drift

LEGACY = tf_keras.optimizers.legacy
DTYPES = ("float32", "bfloat16", "float16", "float64")


def random_bits(dtype, shape=(3, 5)):
    """Returns a tensor of random bits, including NaNs."""
    size = tf.as_dtype(dtype).size
    raw = np.random.default_rng(0).integers(0, 256, (*shape, size), np.uint8)
    raw[..., -2:] |= np.uint8(0xFF) * (np.arange(shape[-1]) == 0)[:, None].astype(np.uint8)
    return tf.bitcast(tf.constant(raw), tf.as_dtype(dtype))


def fingerprint(value):
    """Returns the fingerprint of a variable with this value."""
    return drift.fingerprints([tf.Variable(value)]).numpy()


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_depends_on_bits(dtype, on_gpus, monkeypatch):
    value = random_bits(dtype)
    assert np.isnan(np.asarray(value, np.float64)).any()
    elsewhere = fingerprint(value)
    if on_gpus:  # without the op that reads variables
        monkeypatch.setattr(native, "are_on_cpus", lambda tensors: False)
    found = fingerprint(value)
    np.testing.assert_array_equal(found, elsewhere)
    np.testing.assert_array_equal(found, fingerprint(tf.identity(value)))
    raw = np.asarray(value).view(np.uint8).copy()
    for at in (0, raw.size // 2, raw.size - 1):
        changed = raw.copy()
        changed.reshape(-1)[at] ^= 1
        other = tf.bitcast(tf.constant(changed.reshape(3, 5, -1)), value.dtype)
        assert (fingerprint(other) != found).any()
    assert (fingerprint(value[::-1]) != found).any()  # order matters
    for zero in (tf.zeros([]), tf.zeros([0])):
        assert fingerprint(zero).shape == (2,)


class Sums:
    """The network of one worker that adds what the others, if any, have sent."""

    def __init__(self, rank=0, others=()):
        self.rank = lambda: tf.constant(rank)
        self.others, self.sent = list(others), []

    def all_reduce(self, tensors):
        self.sent += tensors
        return [tf.add_n([t, *(other.pop(0) for other in self.others)]) for t in tensors]


@pytest.mark.parametrize("dtype", [*DTYPES, "int64"])
def test_weights_of_worker_0_are_copied_bit_for_bit(dtype):
    """By one sum, of a size that does not depend on the number of workers."""
    value = random_bits(dtype)
    first = Sums()
    detector_of("restore", [], network=first)._copy_from_first(
        drift.Shared("kernel", [tf.Variable(value)])
    )
    (sent,) = first.sent
    assert sent.dtype.size * tf.size(sent) == 2 * value.dtype.size * tf.size(value)
    own = drift.Shared("kernel", [tf.Variable(tf.ones_like(value)) for _ in range(2)])
    network = Sums(1, [[sent], [tf.zeros_like(sent)]])
    detector_of("restore", [], rank=1, network=network)._copy_from_first(own)
    for copy in own.copies:
        assert np.asarray(copy).tobytes() == np.asarray(value).tobytes()


OPTIMIZERS = {
    "keras": (keras, lambda m: keras.optimizers.SGD(0.1, momentum=m)),
    "keras schedule": (
        keras,
        lambda m: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(m, 10)),
    ),
    "keras scaled": (
        keras,
        lambda m: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(beta_1=m)),
    ),
    "tf_keras": (tf_keras, lambda m: tf_keras.optimizers.SGD(0.1, weight_decay=m)),
    "legacy": (tf_keras, lambda m: tf_keras.optimizers.legacy.SGD(0.1, decay=m)),
    "addons": (tf_keras, lambda m: rs.addons.load().optimizers.SGDW(m, 0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_optimizer_is_described(name):
    family, make = OPTIMIZERS[name]
    one, same, other = (
        json.dumps(consistency.describe(make(m), family.saving)) for m in (0.5, 0.5, 0.25)
    )
    assert one == same != other  # independent of numbers in names
    first, second = differences([one, other])
    assert first.endswith("=0.5") and second.endswith("=0.25") and "," not in first
    for package in ("tensorflow", family.__name__, "tf_redsync"):
        assert json.loads(one)["versions"][package]


def own_rate(library, value):
    """Returns a schedule without `get_config`, as in TensorFlow's Transformer tutorial."""

    class Rate(library.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return value

    return Rate()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("optimizers", [keras.optimizers, tf_keras.optimizers, LEGACY])
def test_rates_without_a_config_are_described(optimizers):
    family = keras if optimizers is keras.optimizers else tf_keras
    saving = None if optimizers is LEGACY else family.saving
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        rate = tf.Variable(0.1)
    for function, name in ((own_rate(family, 0.1), "Rate"), (lambda: rate, "<lambda>")):
        sgd = optimizers.SGD(function, momentum=0.5)
        text = json.dumps(consistency.describe(sgd, saving))
        assert '"momentum": 0.5' in text
        if family is keras or name == "Rate":  # tf_keras calls other functions
            assert name in text
        assert momentum.of(sgd).values == {"momentum": 0.5}


@pytest.mark.parametrize("optimizers", [keras.optimizers, tf_keras.optimizers])
def test_config_that_reads_the_schedule_is_described(optimizers):
    family = keras if optimizers is keras.optimizers else tf_keras

    class ReadsSchedule(optimizers.SGD):
        def get_config(self):
            return {**super().get_config(), "steps": self._learning_rate.decay_steps}

    sgd = ReadsSchedule(family.optimizers.schedules.CosineDecay(0.1, 7), momentum=0.5)
    for saving in (family.saving, None):
        assert '"steps": 7' in json.dumps(consistency.describe(sgd, saving))
    assert momentum.of(sgd).values == {"momentum": 0.5}


def test_digest_of_package_depends_on_its_sources(tmp_path, monkeypatch):
    def digest(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        libraries.digest_of_sources.cache_clear()
        return libraries.digest_of_package.__wrapped__()

    monkeypatch.setattr(libraries, "_PACKAGE", tmp_path / "package")
    in_tree = digest(package__a="1", custom_ops__b="2")
    assert digest(package___native__custom_ops__b="2") == in_tree, "installed from the same tree"
    changed = {digest(package__a="2"), digest(package___native__custom_ops__b="3")}
    assert len(changed | {in_tree}) == 3
    libraries.digest_of_sources.cache_clear()


def test_differences():
    assert differences(["create a", "create b"]) == ["create a", "create b"]
    texts = [
        json.dumps({"a": 1, "b": {"c": [1, 2]}}),
        json.dumps({"a": 1, "b": {"c": [1]}, "d": 0}),
    ]
    assert differences(texts) == ["b.c=[1, 2], d=(none)", "b.c=[1], d=0"]
    many = [json.dumps({str(i): i * k for i in range(1, 20)}) for k in (1, 2)]
    assert differences(many)[0].endswith("10=10, and 9 more")


def detector_of(on_drift, weights, consensus=None, rank=0, network=None):
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(_id_in_cluster=rank))
    step = tf.Variable(7, dtype=tf.int64)
    exchange = types.SimpleNamespace(
        network=network, consensus=consensus, strategy=strategy, step=step
    )
    return drift.DriftDetector(exchange, 5, on_drift, dict, lambda: weights, list)


def reported(on_drift, rates, weights, applies=None, rank=0, steps=(7,)):
    """Reports workers with these learning rates and two words of weights each, in each step."""
    kernel, bias = drift.Shared("kernel", []), drift.Shared("bias", [], applies=applies)
    detector = detector_of(on_drift, [kernel, bias], rank=rank)
    detector._of_numbers = ["learning rate"]
    numbers = [drift.number_words(rate).numpy() for rate in rates]
    rows = [[*n, a, 0, b, 0] for n, (a, b) in zip(numbers, weights, strict=True)]
    for step in steps:
        detector._report(tf.constant(rows, tf.int32), tf.constant(step, tf.int64))


def test_drifted_variables_are_named():
    with pytest.raises(drift.Drifted) as error:
        reported("error", [0.1, 0.1, 0.2], [(1, 2), (3, 4), (1, 2)])
    text = str(error.value)
    assert "worker 1 has the bits of 'kernel'" in text and "and 1 more differ" in text
    assert "worker 2 has the learning rate 0.2, worker 0 has 0.1" in text
    assert "check_every=5" in text


def test_errors_list_few_of_many_workers():
    with pytest.raises(drift.Drifted) as error:
        reported("error", [0.1, *[0.2] * 63], [(1, 2)] * 64)
    text = str(error.value)
    assert text.count("the learning rate 0.2") == 16 and "and 47 more workers." in text
    reports = [[f"build {'other' if rank else 'this'}", [], ""] for rank in range(64)]
    lines = agreement._verdict(reports).splitlines()
    assert lines[1] == "worker 0: build this" and lines[2] == "worker 1: build other"
    assert len(lines) == 18 and lines[-1] == "and 48 more workers"


def test_statistics_averaged_in_rounds_are_ignored(caplog):
    for on_drift in drift.CHOICES:
        reported(on_drift, [0.1, 0.1], [(1, 2), (1, 3)], applies=lambda: False)
    assert not caplog.records
    with pytest.raises(drift.Drifted, match="'kernel'") as error:
        reported("error", [0.1, 0.1], [(1, 2), (2, 3)], applies=lambda: False)
    assert "more differ" not in str(error.value)


def test_weights_at_the_end_of_a_fit_are_only_reported(caplog):
    kernel = drift.Shared("kernel", [tf.Variable([1.0])])
    detectors = [detector_of(on_drift, [kernel]) for on_drift in drift.CHOICES]
    seals = detectors[0].seals().numpy().tolist()
    kernel.copies[0].assign([np.nextafter(np.float32(1), np.float32(2))])
    rows = [seals, detectors[0].seals().numpy().tolist()]
    with pytest.raises(drift.Drifted, match="worker 1 has the bits of 'kernel'"):
        detectors[0].report_last(rows)
    assert not caplog.records
    detectors[1].report_last(rows)
    assert "worker 1 has the bits of 'kernel'" in caplog.text


def test_learning_rates_are_not_restored(caplog):
    """Otherwise the restored weights would drift apart again."""
    reported("restore", [0.1, 0.1], [(1, 2), (1, 3)])
    assert "worker 1 has the bits of 'bias'" in caplog.text
    with pytest.raises(drift.Drifted, match="the learning rate 0.2, worker 0 has 0.1"):
        reported("restore", [0.1, 0.2], [(1, 2), (1, 3)])


def test_restored_weights_are_logged_on_worker_0_at_doubled_counts(caplog):
    for rank in (0, 1):
        reported("restore", [0.1, 0.1], [(1, 2), (1, 3)], rank=rank, steps=range(5, 85, 5))
    steps = [re.search(r"at step (\d+)\.", text)[1] for text in caplog.messages]
    assert steps == ["5", "10", "20", "40", "80"]


@pytest.mark.parametrize(("steps", "agreed"), [(0, [3.0, 4.0]), (2, [1.0, 2.0])])
def test_agreed_weights_of_local_steps_are_restored(steps, agreed, monkeypatch, caplog):
    """Before a round's first step, the model's own weights are the agreed ones."""
    weight = drift.Shared("kernel", [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])])
    consensus = types.SimpleNamespace(steps=tf.Variable(steps, dtype=tf.int64))
    monkeypatch.setattr(drift, "gather", lambda _, words: tf.stack([words + 1, words]))
    monkeypatch.setattr(Sums, "all_reduce", lambda _, tensors: [tensors[0] + [1.0, 0.0]])
    detector = detector_of("restore", [weight], consensus, network=Sums())
    tf.function(detector.step, autograph=False)()
    assert "worker 1 has the bits of 'kernel'" in caplog.text and "at step 7" in caplog.text
    next_bits = np.nextafter(np.float32(agreed), np.float32(np.inf))  # those of worker 0
    for copy in weight.copies:
        np.testing.assert_array_equal(copy, next_bits)


def test_config_and_bad_arguments():
    for wrapped in (keras.optimizers.SGD, tf_keras.optimizers.SGD):
        optimizer = rs.DistributedOptimizer(
            wrapped(0.1), rs.Dense(), check_every=7, on_drift="restore", max_skipped_steps=None
        )
        config = optimizer.get_config()
        clone = type(optimizer).from_config(config)
        assert clone.get_config() == config
        assert (config["check_every"], config["on_drift"]) == (7, "restore")
    for name, value in (
        ("check_every", -1), ("check_every", 0.5), ("on_drift", "ignore"),
        ("direct_collectives", "no"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"`{name}` must be.*{value}"):
            rs.DistributedOptimizer(keras.optimizers.SGD(), rs.Dense(), **{name: value})
