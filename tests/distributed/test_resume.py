"""A training that is saved at step 13 and goes on in new processes has the bits of one that is not.

The reference is the training without a break: hashes of every worker's weights after each step.
"""

import json

import pytest

from tests.distributed import resuming
from tests.distributed.cluster import LEGACY, run_workers

APART = {"cd_sgd", "local_sgd", "sbc"}
SHORT = {
    ("keras3", False): ["redsync", "power_sgd", "cd_sgd", "local_sgd", "auto", "auto in its trial"],
    ("keras3", True): ["local_sgd"],
}


def straight(folder, family, names, together):
    return resuming.straight(folder, family, names, together)


def resumed(folder, family, names, forms, together):
    return resuming.resumed(folder, family, names, forms, together)


def complaints(family, names, together, folder, timeout=280):
    """Yields what differs from the training without a break."""
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
            if reference[name]["changed"]:
                yield f"{name}, worker {rank}: saving changed {reference[name]['changed']}"
    forms = {name: references[0][name]["forms"] for name in names}
    found = run_workers(
        resumed, args=(str(folder), family, names, forms, together), env=env, timeout=timeout
    )
    for rank, worker in enumerate(found):
        results = json.loads(worker["results"])
        for name in names:
            if "error" in results[name]:
                yield f"{name}, worker {rank}: {results[name]['error']}"
                continue
            for form, result in results[name].items():
                yield from different(
                    f"{name}, {form}, worker {rank}", references[rank][name], result, name
                )


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
def test_goes_on_bit_by_bit(family, together, tmp_path):
    names = SHORT[family, together]
    assert list(complaints(family, names, together, tmp_path)) == []
