"""Two hosts with two replicas each: dense within a host, compressed between hosts.

The reference is the same training on two workers of one replica, whose batches are those of a
host's replicas together. One pair of processes runs everything, since starting it takes longest.
"""

import json

import numpy as np
import pytest

from tests import total_state
from tests.deep import DEEP
from tests.distributed.cluster import run_workers

STEPS = 6
ONLY_DEEP = [
    "shared state",
    "switching",
    "trial",
    "all-to-all",
    "pairs",
    "tf_keras",
]  # for `--deep`
# Replicas per host of the clusters that load a checkpoint, by that of the cluster that saved it.
TARGETS = {"two": ("to 2", "to 1"), "one": ("to 2",)}
if DEEP:
    TARGETS = dict.fromkeys(("two", "one"), ("to 2", "to 1", "by hand"))


def train_everything(folder):
    """Train in both ways; returns the weights after every step, bytes, states and messages."""
    from tests.distributed import levels, problems

    levels.start()
    import pathlib

    import keras
    import tf_keras

    import tf_redsync as rs
    from tf_redsync.auto import cost, probe

    x, y = levels.batches(STEPS)
    own_folder = pathlib.Path(folder) / f"worker_{problems.rank()}"
    own_folder.mkdir()
    sgd = lambda: keras.optimizers.SGD(0.05)  # noqa: E731
    redsync = rs.RedSync(density=0.1, dense_below=16, momentum=0.5)

    def wrapped(method, inner=sgd, **options):
        return lambda: rs.DistributedOptimizer(inner(), method, **options)

    found = {}

    def train(name, replicas, optimizer, library=keras):
        training = levels.Training(replicas, optimizer, library)
        found[name] = training.train(x, y)
        return training

    def train_pair(name, optimizer, library=keras):
        """Train hosts of two replicas and hosts of one; returns the two trainings."""
        pair = [train(f"{name}/{replicas}", replicas, optimizer, library) for replicas in (2, 1)]
        for replicas, training in zip((2, 1), pair, strict=True):
            exchange = training.optimizer.exchange
            found[f"{name}/bytes/{replicas}"] = float(exchange.bytes_sent.numpy())
        return pair

    train("plain", 2, sgd)
    train("dense", 2, wrapped(rs.Dense()))
    pair = train_pair("redsync", wrapped(redsync))
    found["table"] = str(pair[0].optimizer.explain())
    found["config"] = json.dumps(pair[0].optimizer.get_config()["two_levels"])
    # A large epsilon: else all first updates have the same magnitude, up to rounding.
    train_pair("averages", wrapped(rs.CodedAdam(density=0.2, epsilon=0.1, average_every=2)))
    train("replicas", 2, wrapped(redsync, two_levels=False))
    if DEEP:
        train_pair("shared state", wrapped(rs.PowerSGD(rank=2)))
        # So sparse that plain SGD gets sparse totals, after two dense steps.
        warm_up = rs.DenseWarmUp(steps=2)
        train_pair("switching", wrapped(rs.RedSync(density=0.01, dense_below=16, warm_up=warm_up)))
        train_pair("all-to-all", wrapped(rs.contrib.SparDL(density=0.1)))
        train_pair("pairs", wrapped(rs.contrib.GTopK(density=0.1)))
        train_pair("tf_keras", wrapped(redsync, lambda: tf_keras.optimizers.SGD(0.05)), tf_keras)

    # On a network so slow that Auto compresses, and tries dense steps from the fifth one on.
    measured, probe.link = probe.link, lambda network: cost.Link.of(rate=1e3, latency=0.0)
    auto = rs.Auto(candidates=(rs.TopK(density=0.1, dense_below=0),))
    if DEEP:
        two, _ = train_pair("trial", wrapped(auto))
    else:
        two = train("trial/2", 2, wrapped(auto))
    found["link"] = str(measured(two.optimizer.exchange.network))
    found |= not_finite(wrapped, keras, x, y, redsync)
    found |= saved(own_folder, wrapped(redsync), keras, *pair)
    found |= fitted(own_folder, keras, wrapped(redsync))
    found |= refused(wrapped, keras)
    return found


def not_finite(wrapped, keras, x, y, method):
    """A NaN on one replica of one host, with and without a LossScaleOptimizer."""
    from tests.distributed import levels

    found = {}

    def loss_scale():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)

    for name, optimizer in (
        ("bad", wrapped(method)),
        ("bad scaled", wrapped(method, loss_scale)),
    ):
        training = levels.Training(2, optimizer, keras)
        before = training.train(x[:2], y[:2])[-1]
        poisoned = x[2].copy()
        poisoned[3, 0, 0] = np.nan  # on the second replica of the second host
        residual = total_state.total(training.optimizer.exchange)
        found[f"{name}/kept"] = training.step(poisoned, y[2]).tobytes() == before.tobytes()
        again = total_state.total(training.optimizer.exchange)
        found[f"{name}/state kept"] = all(
            np.array_equal(residual[n], again[n]) for n in again if n not in ("step", "skipped")
        )
        found[f"{name}/moved"] = training.step(x[3], y[3]).tobytes() != before.tobytes()
        found[f"{name}/skipped"] = int(training.optimizer.exchange.skipped.numpy())
        found[f"{name}/steps"] = int(training.optimizer.exchange.step.numpy())
    found["scale"] = float(training.optimizer.inner_optimizer.dynamic_scale.numpy())
    return found


def saved(folder, optimizer, keras, two, one):
    """Checkpoints between both kinds of clusters, before and after the optimizer is built."""
    import tensorflow as tf

    from tests.distributed import levels

    def totals(training):
        state = total_state.total(training.optimizer.exchange)
        return np.concatenate([np.ravel(state[name]) for name in sorted(state)])

    def residual(training):
        variable = training.optimizer.exchange.states[1].variables_by_name["residual"][0]
        return training.strategy.experimental_local_results(variable)[0].numpy()

    def checkpoint(training):
        return tf.train.Checkpoint(model=training.model, optimizer=training.optimizer)

    found = {}
    for name, source in (("two", two), ("one", one)):
        found[f"totals/{name}"] = totals(source)
        found[f"share/{name} before"] = residual(source)
        prefix = checkpoint(source).save(str(folder / f"from_{name}"))
        for target in TARGETS[name]:
            training = levels.Training(1 if target == "to 1" else 2, optimizer, keras)
            if target == "by hand":
                total = total_state.total(source.optimizer.exchange)
                total_state.restore(training.optimizer.exchange, total)
            else:
                checkpoint(training).restore(prefix).assert_existing_objects_matched()
            found[f"totals/{name} {target}"] = totals(training)
            if target == "to 2":
                found[f"share/{name}"] = residual(training)
    later = levels.Training(2, optimizer, keras)
    with later.strategy.scope():
        later.optimizer = optimizer()
        tf.train.Checkpoint(model=later.model, optimizer=later.optimizer).restore(prefix)
        later.optimizer.build(later.model.trainable_variables)
    found["totals/later"] = totals(later)
    found["copies"] = max(
        len(later.strategy.experimental_local_results(v))
        for state in later.optimizer.exchange.states
        for group in state.variables_by_name.values()
        for v in group
    )
    return found


def fitted(folder, keras, optimizer):
    """Keras 3's `fit`, several steps per execution, with statistics; then save and load."""
    from tests.distributed import levels, problems

    strategy = levels.strategy(2)
    with strategy.scope():
        model = problems.network(keras, normalized=True)
        model.compile(optimizer=optimizer(), loss="mse", steps_per_execution=2)
    history = model.fit(problems.dataset(64, 16), epochs=3, verbose=0)
    model.save(folder / "model.keras")
    state = total_state.total(model.optimizer.exchange)
    with strategy.scope():
        loaded = keras.saving.load_model(folder / "model.keras")
    restored = total_state.total(loaded.optimizer.exchange)
    return {
        "fit/loss": history.history["loss"],
        "fit/weights": levels.weights(strategy, model),
        "fit/steps": int(model.optimizer.exchange.step.numpy()),
        "fit/workers": loaded.optimizer.exchange.workers,
        "fit/error": max(float(np.abs(state[n] - restored[n]).max()) for n in state),
        "fit/residual": sum(np.abs(a).sum() for n, a in state.items() if "residual" in n),
    }


def refused(wrapped, keras):
    """Error texts of features that two levels do not support."""
    import tf_redsync as rs
    from tests.distributed import levels

    found = {}
    for name, optimizer in {
        "local steps": wrapped(rs.LocalSGD(steps=2)),
        "public": wrapped(rs.RedSync(), two_levels=True, direct_collectives=False),
    }.items():
        with pytest.raises(ValueError) as error:
            levels.Training(2, optimizer, keras)
        found[f"refused/{name}"] = str(error.value)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_levels")
    first, second = run_workers(train_everything, args=(str(folder),), timeout=280)
    assert set(first) == set(second)
    for name, value in first.items():
        if not name.startswith("share/"):  # all values that both hosts share
            np.testing.assert_array_equal(value, second[name], err_msg=name)
    return first


def test_dense_equals_plain_optimizer(found):
    np.testing.assert_allclose(found["dense"], found["plain"], rtol=1e-5, atol=1e-6)
    assert np.abs(found["plain"][-1] - found["plain"][0]).max() > 0.1


@pytest.mark.parametrize(
    "name",
    ["redsync", "averages"]
    # Rows of all requests: test_ranks.py; tensors that are dense at first: test_equivalence.py.
    + (ONLY_DEEP if DEEP else []),
)
def test_host_equals_one_worker_with_its_replicas_batches(found, name):
    """In every step, with as many bytes sent."""
    np.testing.assert_allclose(found[f"{name}/2"], found[f"{name}/1"], rtol=1e-5, atol=1e-6)
    assert found[f"{name}/bytes/2"] == found[f"{name}/bytes/1"] > 0


def test_auto_measures_between_hosts(found):
    assert "Link(" in found["link"]  # equal on both hosts, see the fixture
    assert np.abs(found["trial/2"][-1] - found["plain"][-1]).max() > 1e-3


def test_compression_and_levels_change_weights(found):
    for other in ("plain", "replicas"):
        assert np.abs(found["redsync/2"][-1] - found[other][-1]).max() > 1e-3


def test_table_and_config_show_levels(found):
    lines = found["table"].splitlines()
    sent = f"{found['redsync/bytes/2']:,.0f} bytes sent per worker and step"
    start = "dense among the 2 replicas of a host, then 2 workers, " + sent
    (total,) = [i for i, line in enumerate(lines) if line.startswith(start)]
    assert lines[total + 1] == "collectives: TensorFlow's ring, over gRPC"
    assert found["config"] == "null"


@pytest.mark.parametrize("name", ["bad", "bad scaled"])
def test_nan_on_one_replica_skips_step_on_all(found, name):
    assert found[f"{name}/kept"] and found[f"{name}/state kept"] and found[f"{name}/moved"]
    # A LossScaleOptimizer detects it before the exchange and skips the exchange.
    steps = {"bad": (4, 1), "bad scaled": (3, 1)}[name]
    assert (found[f"{name}/steps"], found[f"{name}/skipped"]) == steps
    assert found["scale"] == 32.0


@pytest.mark.parametrize(
    ("source", "target"), [(s, target) for s, targets in TARGETS.items() for target in targets]
)
def test_totals_survive_change_of_cluster(found, source, target):
    totals = found[f"totals/{source}"]
    np.testing.assert_allclose(found[f"totals/{source} {target}"], totals, rtol=1e-6, atol=1e-7)
    assert np.abs(totals).max() > 0.1


def test_host_saves_one_copy(found):
    assert found["copies"] == 1
    np.testing.assert_allclose(found["totals/later"], found["totals/one"], rtol=1e-6, atol=1e-7)
    assert np.abs(found["share/two"]).max() > 0


def test_host_resumes_with_its_own_part(found):
    np.testing.assert_array_equal(found["share/two"], found["share/two before"])
    np.testing.assert_array_equal(found["share/one"], found["share/one before"])


def test_fit(found):
    losses = found["fit/loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert found["fit/steps"] == 3 * 4 and found["fit/workers"] == 2
    assert found["fit/residual"] > 0 and found["fit/error"] < 1e-6


def test_unsupported_features_raise(found):
    assert "one replica in every process" in found["refused/local steps"]
    assert "direct_collectives=False" in found["refused/public"]
