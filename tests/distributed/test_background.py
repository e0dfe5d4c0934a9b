"""Fragments exchanged in the background, on two real workers.

The reference is the same schedule with the exchange in the step that begins it: equal bits in every
step, however late a message is. A failure must end every worker and name the one that failed.
"""

import json
import time

import numpy as np
import pytest

from tests.distributed.cluster import fail_workers, run_workers
from tests.loops import loop

STEPS = 26
TIMED, LATE = 16, 3.0  # steps; seconds
METHODS = {
    "4 bits": "rs.StreamingDiLoCo(steps=6, fragments=2, overlap=3)",
    "16 bits, one step late": "rs.StreamingDiLoCo(steps=4, fragments=1, overlap=1, value_bits=16)",
    "residuals": (
        "rs.BlockQuantized(method=rs.StreamingDiLoCo("
        "steps=6, fragments=2, overlap=3, value_bits=32), bits=4, block=32)"
    ),
}
BAD = (4, 5, 11)  # steps that worker 1 skips in the form "skips"
# Each step of a loop; the same with a snapshot after each step, which waits for the exchange; a
# loop in which one worker skips steps; `fit` in each Keras.
FORMS = {
    "4 bits": ("skips", "fit", "tf_keras"),
    "16 bits, one step late": ("loop",),
    "residuals": ("saved",),
}


def make_model(strategy, method, in_background, keras, **compiled):
    """A model, compiled if options are given, and its optimizer."""
    import tf_redsync as rs
    from tests.distributed import problems

    with strategy.scope():
        model = problems.network(keras)
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer = rs.DistributedOptimizer(inner, eval(method, {"rs": rs}))
        optimizer.build(model.trainable_variables)
        if not in_background:
            optimizer.exchange.network.in_background = lambda: None
        if compiled:
            model.compile(optimizer, "mse", **compiled)
    return model, optimizer


def hashes_of_steps(strategy, method, in_background, form):
    """Hashes after each step, or each epoch of `fit`, and of the final state."""
    import keras
    import tf_keras

    from tests.distributed import problems

    family = tf_keras if form == "tf_keras" else keras
    compiled = {} if form in ("loop", "saved", "skips") else {"steps_per_execution": 3}
    model, optimizer = make_model(strategy, method, in_background, family, **compiled)
    exchange, found = optimizer.exchange, []

    def note(whole):
        state = exchange.worker_state() if whole else {}
        arrays = {n: a.tobytes().hex() for n, a in state.items() if n != "about"}
        sent = [float(exchange.bytes_in_all.numpy())]
        found.append([problems.digest(model), arrays, sent])

    if compiled:
        data = problems.dataset(8 * 2 * STEPS, 16)
        for _ in range(2):
            model.fit(data, epochs=1, verbose=0)
            note(True)
    else:
        step, rank = problems.step_of(strategy, model, optimizer), problems.rank()
        for number in range(STEPS):
            x, y = problems.regression(8, seed=2 * number + rank)
            bad = form == "skips" and rank == 1 and number in BAD
            step((x, np.full_like(y, np.nan) if bad else y))
            note(form == "saved" or number == STEPS - 1)
        if form == "skips":
            assert int(exchange.skipped.numpy()) == len(BAD)
            assert int(optimizer.iterations.numpy()) == STEPS
    assert (exchange.schedule._background is not None) == in_background
    return found


def compare():
    import tf_redsync as rs

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    for name, method in METHODS.items():
        for form in FORMS[name]:
            both = [hashes_of_steps(strategy, method, flag, form) for flag in (False, True)]
            equal = [
                [a == b for a, b in zip(*pair, strict=True)] for pair in zip(*both, strict=True)
            ]
            found[f"{name}, {form}"] = [equal, len({digest for digest, *_ in both[0]})]
    return {"found": json.dumps(found)}


@pytest.fixture(scope="module")
def compared():
    return [json.loads(worker["found"]) for worker in run_workers(compare, timeout=240)]


@loop("name", METHODS)
def test_background_exchange_equals_synchronous_exchange(compared, name):
    for rank, worker in enumerate(compared):
        for form in FORMS[name]:
            equal, different = worker[f"{name}, {form}"]
            skipped = len(BAD) if form == "skips" and rank == 1 else 0
            assert len(equal) - skipped <= different  # the weights change in every other step
            assert all(map(all, equal)), (form, equal)


def train_with_late_messages():
    """Step times; worker 1 joins each exchange `LATE` seconds later.

    Also sizes of the gathers that count skipped steps, and whether they use the steps' group.
    """
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.step import nonfinite
    from tf_redsync.step.background import Background

    strategy, rank, run = rs.MultiWorkerMirroredStrategy(), problems.rank(), Background.run
    gather, gathers = nonfinite.gather, []

    def delayed(self, index, number):
        time.sleep(LATE if rank else 0.0)
        run(self, index, number)

    def counting(network, values):
        gathers.append((network, int(values.shape[0])))
        return gather(network, values)

    Background.run, nonfinite.gather = delayed, counting
    model, optimizer = make_model(strategy, METHODS["4 bits"], True, keras)
    step, seconds = problems.step_of(strategy, model, optimizer), []
    for number in range(TIMED):
        batch = problems.regression(8, seed=2 * number + rank)
        batch = tuple(map(tf.constant, batch))
        before = time.monotonic()
        step(batch)
        seconds.append(time.monotonic() - before)
    own = optimizer.exchange.network
    return {"seconds": seconds, "gathers": [(network is own, size) for network, size in gathers]}


@pytest.fixture(scope="module")
def late():
    return run_workers(train_with_late_messages)[0]


def test_late_message_delays_only_step_that_applies_it(late):
    waits = [number + 1 for number, s in enumerate(late["seconds"]) if s > LATE / 2 and number > 6]
    # Exchanges begin at the third and sixth step of a round and are applied three steps later.
    assert waits == [9, 12, 15]


def test_no_step_waits_for_a_round_trip_to_count_skipped_steps(late):
    """Other collectives gather one number per worker, in a branch, to name a worker in a report."""
    three_int64 = 2 * 3  # words
    gathers = late["gathers"].tolist()
    assert [[in_step, size] for in_step, size in gathers if size > 1] == [[False, three_int64]]


def fail(failure):
    """A training in which worker 1 fails within a background exchange."""
    import os
    import signal

    import keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.step.background import Background

    strategy, run = rs.MultiWorkerMirroredStrategy(timeout_seconds=20), Background.run

    def failing(self, index, number):
        if problems.rank() and int(number) == 3:
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if failure == "stopped":
                time.sleep(600)
            raise ValueError("injected failure")
        run(self, index, number)

    Background.run = failing
    model, optimizer = make_model(strategy, METHODS["4 bits"], True, keras, steps_per_execution=2)
    model.fit(problems.dataset(8 * 2 * 600, 16), epochs=1, verbose=0)


def test_failed_exchange_names_worker():
    first, second = fail_workers(fail, args=("raises",))
    assert "ValueError: injected failure" in second
    assert "worker 1 has failed: ValueError: injected failure" in first


def test_death_in_exchange_names_worker():
    first, _ = fail_workers(fail, args=("killed",))
    assert "DistributedError: worker 1 does not answer" in first


def end_during_exchange():
    """A training that ends during an exchange which worker 1 never joins."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.step import background
    from tf_redsync.step.background import Background

    background._EXIT_SECONDS = 1.0
    strategy, run = rs.MultiWorkerMirroredStrategy(), Background.run

    def blocked(self, index, number):
        time.sleep(600 if problems.rank() else 0)
        run(self, index, number)

    Background.run = blocked
    model, optimizer = make_model(strategy, METHODS["4 bits"], True, keras)
    step = problems.step_of(strategy, model, optimizer)
    for number in range(5):  # begins in the fourth step, due in the sixth
        step(problems.regression(8, seed=number))
    return {"under_way": bool(optimizer.exchange.schedule._background._under_way.numpy())}


def test_program_can_end_during_exchange():
    assert all(worker["under_way"] for worker in run_workers(end_during_exchange, timeout=60))
