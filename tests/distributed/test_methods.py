"""Methods train on two real workers: one of each kind under Keras 3, fewer under tf_keras.

A method's exchange is independent of the Keras version; its schedule and its target depend on the
kind. With `pytest --deep` all methods train under both. `tests/conformance/test_claims.py` traces
each method, and the laws check what it computes.

Starting processes takes longer than training a method, so each pair of processes trains many
methods. It cannot train all: TensorFlow keeps memory maps and threads of every model, and their
number per process is limited.
"""

import json

import numpy as np
import pytest

import tf_redsync as rs
from benchmarks import method_settings
from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers
from tests.methods import METHODS
from tf_redsync.config import registered

# These workers do not synchronize, so their weights differ; all other checks apply.
INDEPENDENT = {"NoExchange"}
# Without `--deep`, `fit` trains the only methods of these kinds in other test files.
TESTED_ELSEWHERE = {
    "CDSGD": "test_own_weights.py",
    "PacTrain": "test_pruning.py",
    "SBC": "test_forgotten_consensus.py",
}
PARTS = 2 if DEEP else 1  # number of parts of the methods; each part has its own processes
# Functions called from loops. The pair exchange of two workers uses a group of its own.
STEPS_PER_EXECUTION = {"GTopK": 2}


def kind(name):
    """The features that the optimizer's wrapper distinguishes: schedule, target and stages."""
    method = registered()[name]()
    schedule = method.sync_schedule
    form = (bool(schedule.local_steps), schedule.delay, schedule.own_point)
    stages = (bool(schedule.warm_up_steps), bool(schedule.dense_every), bool(schedule.phases))
    return (
        *form,
        schedule.masks_local_momentum,
        *stages,
        schedule.waits_for,
        method.traits.whole_model,
    )


def names_of(family):
    names = method_settings.names()
    if DEEP:
        return names
    # Under tf_keras, methods that use the adapter differently (schedule, target). Local steps are
    # in test_forgotten_consensus.py, the usual kind is in test_adapters.py.
    kinds = {name: kind(name)[: None if family == "keras3" else 4] for name in names}
    chosen = {of_a_kind: name for name, of_a_kind in kinds.items()}
    if family == "tf_keras":
        return [name for k, name in chosen.items() if any(k) and not k[0]]
    chosen |= {kinds[name]: name for name in STEPS_PER_EXECUTION}
    return [name for name in chosen.values() if name not in TESTED_ELSEWHERE]


RUNS = [
    (family, part)
    for family, parts in (("keras3", PARTS), ("tf_keras", PARTS if DEEP else 1))
    for part in range(parts)
]


def train_methods(family, names):
    """Fits one model with each method in turn; returns losses and hashes, or the error."""
    import time
    import traceback

    from benchmarks import method_settings
    from tests.distributed import problems

    if family == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    strategy = rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = problems.network(keras)
    start, data = model.get_weights(), problems.dataset(512, 16)
    x, y = problems.regression(512)
    loss = float(np.mean((np.asarray(model(x)) - y) ** 2))

    def inner(name, rate):
        adam = method_settings.setting_of(name).inner == "Adam"
        return keras.optimizers.Adam(rate / 2) if adam else keras.optimizers.SGD(rate)

    def fitted(name):
        method = method_settings.make(name, threshold=0.5, density=0.1, dense_below=16)
        rate = method_settings.learning_rate(method, dense=0.05, votes=0.02)  # 32 steps
        model.set_weights(start)
        with strategy.scope():
            optimizer = rs.DistributedOptimizer(inner(name, rate), method)
            per_execution = STEPS_PER_EXECUTION.get(name, 1)
            model.compile(optimizer, loss="mse", steps_per_execution=per_execution)
        # One long epoch: starting an epoch takes as long as 16 steps.
        losses = model.fit(data, verbose=0).history["loss"]
        return {
            "losses": [loss, *losses],
            "digest": problems.digest(model),
            "served": sum(row.method == name for row in optimizer.explain().rows),
            "steps": int(optimizer.exchange.step.numpy()),
            "skipped": int(optimizer.exchange.skipped.numpy()),
        }

    results = {}
    for name in names:
        began = time.monotonic()
        try:
            results[name] = fitted(name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        # For the report, if a later method hangs.
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return {"results": json.dumps(results)}


def errors_in(name, first, second):
    """Yields the errors in one method's results on both workers."""
    for rank, result in enumerate((first, second)):
        if "error" in result:
            yield f"worker {rank} raised\n{result['error']}"
            return
    losses = first["losses"]
    if not np.isfinite(losses).all() or losses[-1] > 0.9 * losses[0]:
        yield f"the loss does not fall: {losses}"
    if losses != second["losses"]:
        yield f"workers report different losses: {losses}, {second['losses']}"
    if (first["digest"] == second["digest"]) == (name in INDEPENDENT):
        yield f"weights are {'equal' if name in INDEPENDENT else 'not equal'} on both workers"
    for result in (first, second):
        if (result["steps"], result["skipped"]) != (32, 0):
            yield f"{result['steps']} steps, {result['skipped']} of them skipped"
        if not result["served"]:
            yield "all tensors were refused, so nothing was tested"


@pytest.mark.parametrize(("family", "part"), RUNS)
def test_methods_train_with_equal_weights(family, part):
    parts = sum(other == family for other, _ in RUNS)
    names = names_of(family)[part::parts]
    env = LEGACY if family == "tf_keras" else None
    saved = run_workers(train_methods, args=(family, names), env=env, timeout=280)
    first, second = (json.loads(worker["results"]) for worker in saved)
    assert set(first) == set(second) == set(names)
    found = {name: list(errors_in(name, first[name], second[name])) for name in names}
    report = [f"{name}: {text}" for name, texts in found.items() for text in texts]
    assert not report, "\n\n".join(report)


def test_all_kinds_are_tested():
    assert set(method_settings.names()) == METHODS.keys()
    parts = [names_of("keras3")[part::PARTS] for part in range(PARTS)]
    chosen = [name for part in parts for name in part]
    assert sorted(chosen) == sorted(names_of("keras3"))
    assert {kind(name) for name in (*chosen, *TESTED_ELSEWHERE)} == {kind(name) for name in METHODS}
    assert {"CDSGD", "CodedTopK"} < set(names_of("tf_keras"))


VALID_RESULT = {"losses": [2.0, 1.0], "digest": "a", "served": 1, "steps": 32, "skipped": 0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [2.0, 1.9]}, "does not fall"),
        ({"losses": [2.0, np.nan]}, "does not fall"),
        ({"losses": [2.0, 0.9]}, "different losses"),
        ({"digest": "b"}, "weights are not equal"),
        ({"skipped": 3}, "3 of them skipped"),
        ({"served": 0}, "all tensors were refused"),
        ({"error": "ValueError: no"}, "worker 0 raised"),
    ],
)
def test_errors_in_detects_each_error(changes, words):
    assert not list(errors_in("TopK", VALID_RESULT, VALID_RESULT))
    found = list(errors_in("TopK", {**VALID_RESULT, **changes}, VALID_RESULT))
    assert any(words in text for text in found)
    assert list(errors_in("NoExchange", VALID_RESULT, VALID_RESULT)) == [
        "weights are equal on both workers"
    ]
