"""A local step sends nothing, and a background exchange waits for no gradient.

Checked in the graphs of steps that two real workers trace, and by counting collectives at run time.
"""

import dataclasses
import json

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers
from tests.loops import loop

METHODS = (
    "LocalSGD", "PostLocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo", "SBC", "CodedTopK",
    "ZeroOneAdam",
)  # fmt: skip
HABITS = {
    "plain": {},
    "warm_up": {"warm_up": True},
    "scaled": {"scaled": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "everything": {
        "warm_up": True, "scaled": True, "gradient_accumulation_steps": 2, "global_clipnorm": 1.0,
    },
}  # fmt: skip
# The whole table runs with `--deep`.
SHORT = [
    ("DiLoCo", "everything"),
    ("StreamingDiLoCo", "everything"),
    ("ZeroOneAdam", "everything"),
]
ROUND, STEPS, BAD = 4, 14, (1, 8)  # in steps BAD the gradient of worker 1 is not finite
WARM_UP, SCALE = 3, 64.0
BATCHES = 10  # in each epoch of `fit`
FITS = ("repeated", "finite", "arrays", "train_step")
# The steps of each training in which a collective runs.
RUNS = {
    "LocalSGD, plain": (3, 7, 11),
    "DiLoCo, scaled": (3, 7, 11),
    # Two steps per update; a warm-up of three updates, and rounds of four.
    "DiLoCo, everything": (1, 3, 5, 13),
    # Three synchronous steps, then rounds of 1, 1, 2, 4 and 4 steps.
    "ZeroOneAdam, scaled": (0, 1, 2, 3, 4, 6, 10),
}
if not DEEP:
    RUNS = {run: RUNS[run] for run in ("DiLoCo, scaled", "DiLoCo, everything")}


def make_method(rs, name):
    small = {"dense_below": 16}
    return {
        "LocalSGD": lambda: rs.LocalSGD(steps=ROUND),
        "PostLocalSGD": lambda: rs.contrib.PostLocalSGD(start=WARM_UP, steps=ROUND),
        "DiLoCo": lambda: rs.DiLoCo(steps=ROUND),
        "StreamingDiLoCo": lambda: rs.StreamingDiLoCo(steps=6, fragments=2, overlap=3),
        "SparseLoCo": lambda: rs.SparseLoCo(steps=ROUND),
        "SBC": lambda: rs.SBC(steps=ROUND, density=0.3, **small),
        "CodedTopK": lambda: rs.CodedTopK(steps=10, density=0.3, **small),
        "ZeroOneAdam": lambda: rs.contrib.ZeroOneAdam(start=WARM_UP, steps=ROUND, double_after=2),
    }[name]()


class Training:
    """A model, its optimizer and a step of it, with a metric."""

    def __init__(self, strategy, name, warm_up=False, scaled=False, **options):
        import keras
        import tensorflow as tf

        import tf_redsync as rs
        from tests.distributed import problems

        begins = name in ("PostLocalSGD", "ZeroOneAdam")
        warm = {"warm_up": rs.DenseWarmUp(WARM_UP)} if warm_up and not begins else {}
        with strategy.scope():
            self.model = model = problems.network(keras, normalized=True)
            kind = keras.optimizers.Adam if name == "ZeroOneAdam" else keras.optimizers.SGD
            falls = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
            inner = kind(falls, **options)
            if scaled:
                inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE)
            optimizer = rs.DistributedOptimizer(
                inner, make_method(rs, name), check_every=None, **warm
            )
            optimizer.build(model.trainable_variables)
            metric = keras.metrics.MeanAbsoluteError()
        self.optimizer, self.exchange, self.strategy = optimizer, optimizer.exchange, strategy

        def replica_step(x, y):
            with tf.GradientTape() as tape:
                predicted = model(x, training=True)
                loss = optimizer.scale_loss(tf.reduce_mean((predicted - y) ** 2) / 2.0)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            metric.update_state(y, predicted)

        self.step = tf.function(lambda x, y: strategy.run(replica_step, (x, y)), autograph=False)

    def traced(self):
        import tensorflow as tf

        from tests.distributed import graphs

        rows = [tf.TensorSpec([8, n], tf.float32) for n in (12, 1)]
        return graphs.Step(self.step.get_concrete_function(*rows))

    def local(self, variable):
        return self.strategy.experimental_local_results(variable)[0]

    def state(self, name=None):
        """The variables of the exchange's state."""
        groups = [s.variables_by_name for s in self.exchange.states]
        found = [v for g in groups for n, vs in g.items() if name in (None, n) for v in vs]
        return [self.local(v) for v in found]


def count_collectives():
    """A variable that counts executed collectives, of those traced from now on."""
    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    from tf_redsync.network import collectives

    counter = tf.Variable(0, dtype=tf.int64, trainable=False)

    def counted(function):
        def call(*args, **kwargs):
            counter.assign_add(1, read_value=False)
            return function(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_reduce_v2", "all_gather", "all_gather_v2", "all_to_all_v2"):
        setattr(collective_ops, name, counted(getattr(collective_ops, name)))
    ours = {kind: counted(function) for kind, function in collectives._COLLECTIVES.items()}
    collectives._COLLECTIVES.update(ours)
    return counter


def follow(strategy, name, habit, counter):
    """What each step of a training sends and changes; some steps overflow on worker 1 only."""
    from tests.distributed import problems

    training, rank, found = Training(strategy, name, **HABITS[habit]), problems.rank(), []
    optimizer = training.optimizer
    for number in range(STEPS):
        x, y = problems.regression(8, seed=2 * number + rank)
        if rank == 1 and number in BAD:
            y[3] = np.inf
        before = int(counter.numpy())
        training.step(x, y)
        found.append(
            {
                "collectives": int(counter.numpy()) - before,
                "bytes": float(training.exchange.bytes_sent.numpy()),
                "iterations": int(optimizer.iterations.numpy()),
                "rate": float(optimizer.learning_rate),
                "scale": float(optimizer.scale_loss(1.0)),
                "weights": problems.digest(training.model),
                "finite": bool(all(np.isfinite(w).all() for w in training.model.get_weights())),
                "skipped": int(training.exchange.skipped.numpy()),
            }
        )
    part = training.exchange.worker_state()
    own = [a for n, a in part.items() if n.startswith("optimizer/") and a.size == 1]
    found[-1]["saved"] = [float(a.item()) for a in own]
    return found


def follow_fit(strategy, case, counter):
    """Collectives and logs of each batch of `fit`, and its errors with constant weights."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    class LastBatch(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)
            x, y = data
            return {"last": tf.reduce_mean((self(x) - y) ** 2), "rows": tf.shape(x)[0]}

    @tf.function
    def count(batches):
        number = 0
        for _ in batches:
            number += 1
        return number

    class Batches(keras.callbacks.Callback):
        collectives, logs = [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.before = int(counter.numpy())

        def on_train_batch_end(self, batch, logs=None):
            self.collectives.append(int(counter.numpy()) - self.before)
            self.logs.append(dict(logs))
            if case == "finite":  # other data, in the middle of an epoch
                rows = strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(2))
                assert int(count(rows)) == 3

    x, y = problems.regression(2 * 4 * BATCHES, seed=1)
    own = [rows[problems.rank() :: 2] for rows in (x, y)]
    data = tf.data.Dataset.from_tensor_slices(tuple(own)).batch(4, drop_remainder=True)
    kind = LastBatch if case == "train_step" else keras.Sequential
    with strategy.scope():
        model = kind([keras.Input(x.shape[1:]), keras.layers.Dense(y.shape[1])])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.0), rs.DiLoCo(steps=ROUND))
        model.compile(optimizer, "mse", metrics=["mae"])
    batches = Batches()
    options = {"epochs": 2, "verbose": 0, "callbacks": [batches]}
    if case == "arrays":
        history = model.fit(x, y, batch_size=8, shuffle=False, **options).history
    elif case == "finite":
        history = model.fit(rs.already_sharded(data, strategy), **options).history
    else:
        data, options["steps_per_epoch"] = data.repeat(), BATCHES
        history = model.fit(rs.already_sharded(data, strategy), **options).history
    kernel, bias = model.get_weights()
    errors = np.reshape(x @ kernel + bias - y, [BATCHES, -1])
    return {
        "collectives": batches.collectives,
        "logs": batches.logs,
        "epochs": {name: history[name] for name in batches.logs[0]},
        "mse": np.mean(errors**2, axis=1).tolist(),
        "mae": np.mean(np.abs(errors), axis=1).tolist(),
    }


def train_and_check_graphs(cases, runs):
    """Trains step by step; returns each step's record, and on worker 0 the errors in each graph."""
    import tf_redsync as rs
    from tests.distributed import graphs, problems

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    for name, habit in cases:
        training = Training(strategy, name, **HABITS[habit])
        if problems.rank():
            continue
        step, wrong = training.traced(), []

        def shared(conditional, step=step):
            """Whether a predicate depends only on counters, which are equal on all workers."""
            return not any(graphs.is_backward(o) for o in step.decided_by(conditional))

        def decided(operation, shared=shared):
            around = [call for call, _ in operation.path if call.is_conditional]
            return any(shared(call) for call in around)

        for operation in step.collectives:
            if not decided(operation):
                wrong.append(f"{operation.name} is in no branch of some steps only")
        if name != "ZeroOneAdam":  # the momentum changes in each step
            written = step.assigned(training.state())
            wrong += [f"{o.name} writes state in each step" for o in written if not decided(o)]
        sends = [o for o in step.operations if o.type == "QueueEnqueueV2"]
        wrong += [f"{o.name} is in each step" for o in sends if not decided(o)]
        for operation in sends:
            late = [o.name for o in step.waits_for(operation) if graphs.is_backward(o)]
            wrong += [f"{operation.name} waits for {late[0]}"] if late else []
        found[f"{name}, {habit}"] = {
            "wrong": wrong,
            "collectives": len(step.collectives),
            "sends": len(sends),
            "backward": sum(map(graphs.is_backward, step.operations)),
        }
    counter = count_collectives()
    fits = {case: follow_fit(strategy, case, counter) for case in (FITS if runs else ())}
    runs = {run: follow(strategy, *run.split(", "), counter) for run in runs}
    return {"graphs": json.dumps(found), "runs": json.dumps(runs), "fits": json.dumps(fits)}


def rounds(backends):
    """Weights after two rounds that end within a step, by backend, and after two of `fit`."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tf_redsync import ops

    def weights(model):
        return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=[ROUND * 4, 6]).astype("f4"),
        rng.normal(size=[ROUND * 4, 3]).astype("f4"),
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(4)

    def train(name, backend, steps, epochs):
        ops.set_backend(backend)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3)])
            method = dataclasses.replace(make_method(rs, name), steps=steps)
            model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.05), method), "mse")
        found[f"{name}, start"] = weights(model)
        model.fit(data, epochs=epochs, steps_per_epoch=2 * ROUND // epochs, verbose=0)
        return weights(model)

    with strategy.scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3)])
        method = rs.CodedTopK(steps=ROUND, density=0.3, warm_up=rs.DenseWarmUp(1))
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(rs.DistributedOptimizer(inner, method), "mse")
    for name in ("dense", "selected"):  # a round each
        model.fit(data, steps_per_epoch=ROUND, verbose=0)
        momenta = [m.numpy().ravel() for m in inner.momentums]
        found[f"momentum kept, {name}"] = float(np.mean(np.concatenate(momenta) != 0))

    for name in backends:
        found[f"{name}, fit"] = train(name, "native", 5 * ROUND, 2)
        for backend in backends[name]:
            found[f"{name}, {backend}"] = train(name, backend, ROUND, 1)
    return found


# By method. Backends have equal bits, so one reference serves both; DiLoCo selects no elements.
BACKENDS = dict.fromkeys(("SparseLoCo", "SBC", "CodedTopK"), ("native", "tensorflow"))
BACKENDS["DiLoCo"] = ("native",)


@pytest.fixture(scope="module")
def workers():
    return run_workers(rounds, args=(BACKENDS,), timeout=300)


def test_only_a_selection_clears_momentum(workers):
    """In a dense warm-up the delay is a round for all elements, as in `LocalSGD`."""
    for found in workers:
        assert found["momentum kept, dense"] == 1 > found["momentum kept, selected"]


@pytest.mark.parametrize(
    ("name", "backend"), [(n, backend) for n, backends in BACKENDS.items() for backend in backends]
)
def test_round_ended_by_step_equals_round_ended_by_fit(workers, name, backend):
    case = f"{name}, {backend}"
    for worker in workers:
        assert np.abs(worker[case] - worker[f"{name}, start"]).max() > 0.01
        np.testing.assert_allclose(worker[case], worker[f"{name}, fit"], rtol=1e-5)
        np.testing.assert_array_equal(worker[case], workers[0][case])


@pytest.fixture(scope="module")
def records():
    return run_workers(train_and_check_graphs, args=(SHORT, list(RUNS)), timeout=300)


def check_graph(case, method):
    assert case["collectives"] and case["backward"]
    assert bool(case["sends"]) == (method == "StreamingDiLoCo")
    assert case["wrong"] == []


@loop("method, habit", SHORT)
def test_graph_of_step(records, method, habit):
    check_graph(json.loads(records[0]["graphs"])[f"{method}, {habit}"], method)


@pytest.mark.deep
@pytest.mark.parametrize("method", METHODS)
def test_graphs_of_all_steps(method):
    cases = [(method, habit) for habit in HABITS]
    graphs = json.loads(
        run_workers(train_and_check_graphs, args=(cases, []), timeout=300)[0]["graphs"]
    )
    assert len(graphs) == len(cases)
    for case in graphs.values():
        check_graph(case, method)


@pytest.fixture
def runs(records):
    return [json.loads(worker["runs"]) for worker in records]


@loop("run", RUNS)
def test_local_step_sends_nothing(runs, run):
    for worker in runs:
        sending = [i for i, step in enumerate(worker[run]) if step["collectives"]]
        assert sending == list(RUNS[run])
        counted = [i for i, step in enumerate(worker[run]) if step["bytes"]]
        if "everything" not in run:  # where the bytes are those of the last update
            assert set(counted) <= set(sending)


@loop("case", FITS)
def test_fit_sends_nothing_in_local_step(records, case):
    """Logs are averaged in the first batch of an epoch and at the end of a round."""
    first, second = (json.loads(worker["fits"])[case] for worker in records)
    sending = [epoch + i for epoch in (0, BATCHES) for i in (0, ROUND - 1, 2 * ROUND - 1)]
    for worker in (first, second):
        assert case == "train_step" or list(np.flatnonzero(worker["collectives"])) == sending
    assert first["logs"] == second["logs"]
    assert first["epochs"] == second["epochs"]
    latest = [max(i for i in sending if i <= batch) % BATCHES for batch in range(2 * BATCHES)]
    if case == "train_step":
        last = [first["mse"][i] for i in latest]
        np.testing.assert_allclose([logs["last"] for logs in first["logs"]], last, rtol=1e-5)
        np.testing.assert_allclose(first["epochs"]["last"], first["mse"][-1], rtol=1e-5)
        assert first["epochs"]["rows"] == [4, 4]
        return
    for name, errors in (("loss", first["mse"]), ("mae", first["mae"])):
        means = [np.mean(errors[: i + 1]) for i in latest]
        np.testing.assert_allclose([logs[name] for logs in first["logs"]], means, rtol=1e-5)
        np.testing.assert_allclose(first["epochs"][name], np.mean(errors), rtol=1e-5)


@loop("run", RUNS)
def test_worker_skips_alone_and_all_agree_at_end_of_round(runs, run):
    first, second = (worker[run] for worker in runs)
    ends = [i for i in RUNS[run] if first[i]["bytes"]]
    for i in ends:
        for key in ("weights", "iterations", "rate", "skipped"):
            assert first[i][key] == second[i][key], (i, key)
    assert all(step["finite"] for step in (*first, *second))
    local = [bad for bad in BAD if bad not in RUNS[run]]
    assert local
    for worker in (first, second):
        assert worker[-1]["scale"] in worker[-1]["saved"] or "plain" in run
    if "plain" not in run:
        assert first[-1]["scale"] == SCALE
        assert second[-1]["scale"] == SCALE / 2 ** len(BAD)
    last = ends[-1]
    assert first[last]["skipped"] == sum(bad <= last for bad in BAD)
    apart = [i for i in range(local[0], last) if i not in RUNS[run]]
    assert any(first[i]["weights"] != second[i]["weights"] for i in apart)
