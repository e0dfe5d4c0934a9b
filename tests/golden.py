"""Golden values: hashes of every method's results, to verify that a refactoring keeps all bits.

    python -m tests.golden record golden.json     before the change; resumes a partial file
    python -m tests.golden compare golden.json    after it; prints differences, exit status 1

The file has two tables. `loopback`: each descriptor of the conformance table, `STEPS` steps on
three workers in one process; totals and states of all workers, bytes sent. `workers`: each public
method in each Keras family, `STEPS` steps on two worker processes; the weights after each step, the
final optimizer variables, bytes sent. Values depend on the machine and the TensorFlow version. A
file records both and is not part of the repository.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np

STEPS = 30
FAMILIES = ("keras3", "tf_keras", "legacy")
METHODS_A_JOB = 12  # TensorFlow keeps memory maps and threads of every model of a process


def digest(arrays):
    """Hash of a sequence of arrays: dtypes, shapes and bits."""
    found = hashlib.sha256()
    for array in map(np.asarray, arrays):
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def on_loopback(name):
    """Runs one descriptor; returns a hash of all totals and states, and the bytes of each step."""
    import tensorflow as tf

    from tests.conformance import harness
    from tests.conformance.table import TABLE
    from tf_redsync.exchange import loopback
    from tf_redsync.exchange.layout import BucketLayout

    descriptor, workers = TABLE[name], 3
    layout = BucketLayout(descriptor.specs, workers)
    shapes = tuple(s.shape for s in descriptor.specs)
    states = harness.initial_states(descriptor.method, layout, descriptor.start)
    traced = loopback.traced_step(descriptor.method, layout)
    hashes, sent = [], []
    for number in range(STEPS):
        grads = harness.tensors(harness.make_grads(number, workers, shapes))
        step = traced(grads, states, number)
        states = step.states
        arrays = [np.asarray(t) for t in tf.nest.flatten([step.totals, sorted_states(states)])]
        hashes.append(digest(arrays).encode())
        sent.append(step.bytes_sent)
    return {"hash": hashlib.sha256(b"".join(hashes)).hexdigest()[:16], "bytes": sum(sent)}


def sorted_states(states):
    """States as lists of (name, tensor), sorted by name."""
    return [[state[name] for name in sorted(state)] for state in states]


def on_workers(family, names):
    """Trains a model with each method in turn; runs in a worker."""
    import traceback

    import tf_redsync as rs
    from tests.distributed import resuming

    strategy = rs.MultiWorkerMirroredStrategy()
    results = {}
    for name in names:
        began = time.monotonic()
        try:
            training = resuming.Training(strategy, family, name)
            weights = training.train(0, STEPS)
            optimizer = training.model.optimizer
            kept = optimizer.variables
            kept = [np.asarray(v) for v in (kept() if callable(kept) else kept)]
            results[name] = {
                "weights": hashlib.sha256("".join(weights).encode()).hexdigest()[:16],
                # Sorted: names and order of variables may change.
                "variables": digest(sorted(kept, key=lambda a: digest([a]))),
                "bytes": float(optimizer.exchange.bytes_in_all.numpy()),
            }
        except Exception:
            results[name] = {"error": traceback.format_exc()[-400:]}
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return {"results": json.dumps(results)}


def missing(found):
    """Yields `(table, key, make)` for each missing result; `make` returns results by key."""
    from benchmarks import method_settings
    from tests.conformance.table import TABLE
    from tests.distributed import resuming
    from tests.distributed.cluster import LEGACY, run_workers

    for name in TABLE:
        if name not in found["loopback"]:
            yield "loopback", name, lambda name=name: {name: on_loopback(name)}
    everything = [*method_settings.names(), *resuming.cases()]
    for family in FAMILIES:
        left = [n for n in everything if f"{family}/{n}" not in found["workers"]]
        env = None if family == "keras3" else LEGACY
        for i in range(0, len(left), METHODS_A_JOB):
            some = left[i : i + METHODS_A_JOB]

            def train(family=family, some=some, env=env):
                saved = run_workers(on_workers, args=(family, some), env=env, timeout=500)
                both = [json.loads(worker["results"]) for worker in saved]
                return {f"{family}/{n}": [one[n] for one in both] for n in some}

            yield "workers", f"{family}: {', '.join(some)}", train


def main(argv=None):
    """Records or compares golden values; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    import tensorflow as tf

    here = {"tensorflow": tf.__version__, "machine": platform.processor() or platform.machine()}
    golden = json.loads(options.file.read_text()) if options.file.exists() else None
    if options.command == "compare" and golden is None:
        parser.error(f"there is no file to compare with. Received: file={options.file}")
    path = options.file
    if options.command == "compare":
        path = options.file.with_suffix(".now.json")
        path.unlink(missing_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    found = {"loopback": {}, "workers": {}, **found, "where": here}
    for table, key, make in missing(found):
        began = time.monotonic()
        found[table] |= make()
        print(f"{table} {key}: {time.monotonic() - began:.1f} s", flush=True)
        path.write_text(json.dumps(found, indent=1, sort_keys=True))
    if options.command == "record":
        return 0
    different = [
        f"{table} {key}: {golden[table].get(key)} before, {found[table].get(key)} now"
        for table in ("loopback", "workers")
        for key in sorted({*golden[table], *found[table]})
        if golden[table].get(key) != found[table].get(key)
    ]
    print("\n".join([*different, f"{len(different)} differences"]))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
