"""A training saved at step 13 and resumed in new processes has the bits of an uninterrupted one.

The reference is the uninterrupted training: hashes of each worker's weights after every step.
"""

import json

import numpy as np
import pytest

from benchmarks import method_settings
from tests.distributed import resuming
from tests.distributed.cluster import LEGACY, run_workers

# By family, and whether individual weights are synchronized before the save.
SHORT = {
    ("keras3", False): ["redsync", "auto", "streaming_in_blocks", "backup"],
    ("legacy", False): ["local_sgd"],
}
EVERYTHING = {
    ("keras3", True): ["cd_sgd", "local_sgd", "sbc", "streaming"],
    ("keras3", False): [*resuming.cases(), "backup"],
    ("tf_keras", True): ["cd_sgd", "local_sgd"],
    ("tf_keras", False): list(resuming.cases()),
    ("legacy", False): list(resuming.cases()),
}
AT_ONCE = 6  # methods per pair of processes: TensorFlow keeps some memory of every model


FAMILIES = ("keras3", "tf_keras", "legacy")


def portions(names):
    return [names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)]


def straight(folder, family, names, together):
    return resuming.straight(folder, family, names, together)


def alone(folder):
    return resuming.alone(folder)


def resumed(folder, family, names, forms, together):
    return resuming.resumed(folder, family, names, forms, together)


def differences(family, names, together, folder, timeout=280):
    """Yields differences from the uninterrupted training."""
    env = None if family == "keras3" else LEGACY
    found = run_workers(
        straight, args=(str(folder), family, names, together), env=env, timeout=timeout
    )
    references = [json.loads(worker["results"]) for worker in found]
    for name in names:
        for rank, reference in enumerate(references):
            if "error" in reference[name]:
                yield f"{name}, worker {rank}: {reference[name]['error']}"
                return
            if reference[name].get("changed"):
                yield f"{name}, worker {rank}: saving changed {reference[name]['changed']}"
    forms = {name: references[0][name].get("forms") for name in names}
    found = run_workers(
        resumed, args=(str(folder), family, names, forms, together), env=env, timeout=timeout
    )
    for rank, worker in enumerate(found):
        results = json.loads(worker["results"])
        for name in names:
            if "error" in results[name]:
                yield f"{name}, worker {rank}: {results[name]['error']}"
                continue
            if name == "backup":
                yield from of_a_backup(references[rank][name], results[name])
                continue
            for form, result in results[name].items():
                yield from different(
                    f"{name}, {form}, worker {rank}", references[rank][name], result, name
                )


def of_a_backup(reference, result):
    if result != {**reference, "epochs": 1}:
        yield f"backup: {result}, uninterrupted {reference}"


def different(where, reference, result, name):
    expected = reference["digests"][resuming.SAVED :]
    if len(set(expected)) < 5:
        yield f"{where}: the weights hardly move"
    if result["digests"] != expected:
        pairs = zip(result["digests"], expected, strict=True)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        yield f"{where}: other weights from step {resuming.SAVED + first + 1} on"
    if result["state"] != reference["state"]:
        keys = result["state"].keys() | reference["state"].keys()
        names = [k for k in keys if result["state"].get(k) != reference["state"].get(k)]
        yield f"{where}: another state at the end: {sorted(names)[:5]}"


@pytest.mark.parametrize(("family", "together"), SHORT)
def test_resumes_bit_for_bit(family, together, tmp_path):
    names = SHORT[family, together]
    assert list(differences(family, names, together, tmp_path)) == []


RUNS = [
    *((f, t, names) for (f, t), found in EVERYTHING.items() for names in portions(found)),
    *((f, False, names) for f in FAMILIES for names in portions(method_settings.names())),
]


@pytest.mark.deep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("family", "together", "names"), RUNS)
def test_all_cases_resume_bit_for_bit(family, together, names, tmp_path):
    found = list(differences(family, names, together, tmp_path, timeout=700))
    assert found == [], "\n".join(found)


def test_chief_saves_alone_and_each_part_counts_once(tmp_path):
    """No worker waits; the saved state is shared out, with a warning that a part is missing."""
    first, second = (json.loads(w["results"]) for w in run_workers(alone, args=(str(tmp_path),)))
    both = np.array([first["residuals"], second["residuals"]])
    assert np.abs(both).sum(axis=1).min() > 0 and not np.array_equal(both[0], both[1])
    for seen in (first, second):
        np.testing.assert_allclose(seen["loaded"], both[0] / 2, rtol=1e-6)
        np.testing.assert_allclose(seen["shared"], both.sum(axis=0) / 2, rtol=1e-6, atol=1e-8)
        assert seen["counted"] == 8
        assert seen["damaged"].startswith("ValueError: on worker 1, 'step' of a part must be")
        assert seen["apart"]
        assert seen["in a round"].startswith("Disagreement: the workers disagree"), seen
        assert "bring the workers' weights together" in seen["in a round"]
        assert "to_consensus()" in seen["in a round"]
    assert "ranks 1 are missing" in first["warned"][0] and not second["warned"]
    saved = ["a.weights.h5", "chief.index", "local.keras"]
    assert all((tmp_path / name).exists() for name in saved)
    assert not (tmp_path / "apart.keras").exists()


def resave(folder, loads, ranks_to_load):
    """Loads files saved by another number of workers; returns this worker's part, and saves."""
    import pathlib

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, rank = rs.MultiWorkerMirroredStrategy(), problems.rank()
    if loads is None:
        training = resuming.Training(strategy, "keras3", "redsync")
        training.train(0, 5)
        model = training.model
    else:
        files = pathlib.Path(folder) / loads
        with strategy.scope():
            model = keras.saving.load_model(files / f"{min(rank, 1)}.keras")
        parts = [rs.read_worker_state(files / f"{r}.keras") for r in ranks_to_load[rank]]
        model.optimizer.exchange.restore_worker_states(parts)
    own = model.optimizer.exchange.worker_state()
    into = pathlib.Path(folder) / f"of_{int(own['workers'])}"
    into.mkdir(exist_ok=True)
    model.save(into / f"{rank}.keras")
    kinds = json.loads(own["about"].tobytes())["kinds"]
    return {name: own[name] for name, kind in kinds.items() if kind == "sum"}


@pytest.mark.deep
def test_four_two_and_three_workers_keep_the_sums(tmp_path):
    folder = str(tmp_path)
    found = [
        run_workers(resave, 4, (folder, None, None), timeout=200),
        run_workers(resave, 2, (folder, "of_4", [[0, 3], [1, 2]]), timeout=200),
        run_workers(resave, 3, (folder, "of_2", [[0], [1], []]), timeout=200),
        run_workers(resave, 3, (folder, "of_2", [[0, 1]] * 3), timeout=200),
    ]
    totals = [{n: sum(np.float64(w[n]) for w in job) for n in job[0]} for job in found]
    for name, expected in totals[0].items():
        assert np.abs(expected).max() > 0
        for total in totals[1:]:
            size = np.abs(expected).max()
            np.testing.assert_allclose(total[name] / size, expected / size, rtol=0, atol=3e-7)
