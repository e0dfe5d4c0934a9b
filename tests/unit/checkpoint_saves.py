"""Saves two workers' checkpoints in processes that are killed. Runs without TensorFlow.

python checkpoint_saves.py every_operation DIRECTORY          kill after each file operation
python checkpoint_saves.py random_times DIRECTORY 30 SEED    kill at random times of 30 saves
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np

WORKERS, ARRAYS, KEEP = 2, 3, 2
JOB = 32 * "0"
OPERATIONS = ("fsync", "replace", "unlink", "rmdir", "mkdir")
SUBJECT = {
    "kind": {"method": "RedSync"},
    "variables": {"model": [["w", "float32", [50]]]},
    "options": [],
}


def load_store():
    """Imports the store without the package's `__init__`, which imports TensorFlow."""
    folder = Path(__file__).resolve().parents[2] / "tf_redsync"
    package = types.ModuleType("tf_redsync")
    package.__path__ = [str(folder)]
    sys.modules.setdefault("tf_redsync", package)
    from tf_redsync.state import checkpoint_manifest, checkpoint_store

    return checkpoint_store.Store, checkpoint_manifest.Manifest


def arrays(save, rank):
    """Returns a worker's arrays; each value identifies the save, so mixed saves are detected."""
    return {f"a{i}": np.full([50], 1000 * save + 10 * rank + i) for i in range(ARRAYS)}


def save_all(store, saves, committed=lambda save: None):
    """Writes checkpoints one after the other, as the workers do.

    Args:
        store: The store.
        saves: Total number of saves.
        committed: Called with the number of each committed save.
    """
    _, manifest = load_store()
    store.leave_token(JOB, 0)
    store.remove_token(JOB, 0)
    store.remove_leftovers()
    first = newest(store)
    number = store.next_number()
    for save in range(0 if first is None else first + 1, saves):
        store.claim(number)
        parts = tuple(
            store.write_part(number, rank, arrays(save, rank), whole=not rank)
            for rank in range(WORKERS)
        )
        described = manifest(save, save, 0, parts, SUBJECT, {})
        store.commit(number, described)
        committed(save)
        store.remove_old(KEEP, SUBJECT)
        number += 1


def rewrite(path, place, value):
    """Changes a value of a manifest and makes its checksum valid again.

    Args:
        path: The manifest.
        place: Keys and indices, joined by dots.
        value: The new value.
    """
    values = json.loads(path.read_text())
    del values["checksum"]
    *outer, last = place.split(".")
    inner = values
    for key in outer:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = value
    text = json.dumps(values, sort_keys=True).encode()
    path.write_text(json.dumps(values | {"checksum": hashlib.sha256(text).hexdigest()}))


def newest(store):
    """Returns the save number of the newest checkpoint, or None; asserts that all are complete."""
    saves = []
    for number in store.numbers():
        manifest = store.manifest(number)
        store.verify(number, manifest.parts)
        for rank in range(WORKERS):
            read = store.read_part(number, manifest.parts[rank])
            assert read.keys() == arrays(0, 0).keys()
            for name, value in arrays(manifest.step, rank).items():
                np.testing.assert_array_equal(read[name], value)
        saves.append(manifest.step)
    return saves[0] if saves else None


@contextlib.contextmanager
def each_operation(then):
    """Calls `then(number, name, path)` after each file operation."""
    done, operations = [0], {name: getattr(os, name) for name in OPERATIONS}

    def counted(name):
        def run(*args, **kwargs):
            result = operations[name](*args, **kwargs)
            done[0] += 1
            then(done[0] - 1, name, args[0])
            return result

        return run

    try:
        for name in OPERATIONS:
            setattr(os, name, counted(name))
        yield done
    finally:
        for name, operation in operations.items():
            setattr(os, name, operation)


def save_in_child(directory, saves, kill_at=None, kill_after=None):
    """Saves in a process that is killed; returns the last save that it reported as committed."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            with each_operation(
                lambda number, *_: number == kill_at and os.kill(os.getpid(), signal.SIGKILL)
            ):
                save_all(load_store()[0](directory), saves, lambda n: os.write(write, b"%d\n" % n))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    with open(read) as file:
        committed = [int(line) for line in file if line.endswith("\n")]
    assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL), "the child failed before it was killed"
    return committed[-1] if committed else None


def check(directory, committed, before):
    """Asserts that the newest checkpoint is the last committed one or the one after it."""
    found = newest(load_store()[0](directory))
    least = before if committed is None else committed
    assert found is not None or least is None, f"lost checkpoint {least}"
    assert found in (least, 0 if least is None else least + 1), (found, least)
    return found


def check_cleanup(directory):
    """Asserts that the next run removes the leftovers of the killed one."""
    store = load_store()[0](directory)
    before = newest(store)
    save_all(store, (-1 if before is None else before) + 2)
    assert len(store.numbers()) <= KEEP
    names = sorted(path.name for path in directory.rglob("*"))
    expected = ["manifest.json", "part-00000.npz", "part-00001.npz"] * len(store.numbers())
    assert [n for n in names if not n.startswith("checkpoint-")] == sorted(expected), names


def every_operation(directory):
    log = []
    with each_operation(lambda _, *operation: log.append(operation)):
        save_all(load_store()[0](directory), 4)
    for at in range(len(log)):
        shutil.rmtree(directory)
        committed = save_in_child(directory, 4, kill_at=at)
        check(directory, committed, None)
        check_cleanup(directory)
    return len(log)


def random_times(directory, saves, seed):
    chance, found, kills = random.Random(seed), None, 0
    while found is None or found < saves:
        committed = save_in_child(directory, 10**9, kill_after=chance.uniform(0.0, 0.03))
        found = check(directory, committed, found)
        kills += 1
    check_cleanup(directory)
    return kills


if __name__ == "__main__":
    job, folder, *numbers = sys.argv[1:]
    jobs = {"every_operation": every_operation, "random_times": random_times}
    print(jobs[job](Path(folder), *map(int, numbers)))
    assert "tensorflow" not in sys.modules and "keras" not in sys.modules
