"""Saves checkpoints as two workers do, in processes that are killed; without TensorFlow.

python checkpoint_saves.py everywhere DIRECTORY          killed after each operation on the disk
python checkpoint_saves.py whenever DIRECTORY 30 SEED    killed at random moments of 30 saves
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
SUBJECT = {"kind": {"method": "RedSync"}, "variables": {"model": [["w", "float32", [50]]]}}


def load_store():
    """The store without the package around it, which imports TensorFlow."""
    folder = Path(__file__).resolve().parents[2] / "tf_redsync"
    package = types.ModuleType("tf_redsync")
    package.__path__ = [str(folder)]
    sys.modules.setdefault("tf_redsync", package)
    from tf_redsync.state import checkpoint_manifest, checkpoint_store

    return checkpoint_store.Store, checkpoint_manifest.Manifest


def arrays(save, rank):
    """What a worker saves: any mixture of two saves is found."""
    return {f"a{i}": np.full([50], 1000 * save + 10 * rank + i) for i in range(ARRAYS)}


def save_all(store, saves, said=lambda save: None):
    """Makes checkpoints, one after the other, as the workers do."""
    _, manifest = load_store()
    store.leave_token(JOB, 0)
    store.remove_token(JOB, 0)
    store.remove_leftovers()
    first = newest(store)
    number = store.next_number()
    for save in range(0 if first is None else first + 1, saves):
        parts = tuple(
            store.write_part(number, rank, arrays(save, rank), whole=not rank)
            for rank in range(WORKERS)
        )
        described = manifest(save, save, 0, parts, SUBJECT, {})
        store.commit(number, described)
        said(save)
        store.remove_old(KEEP, SUBJECT)
        number += 1


def rewrite(path, place, value):
    """Changes a value of a manifest and makes its checksum valid again.

    Args:
        path: The file.
        place: Names and positions with dots between them.
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
    """The newest checkpoint as the number of its save, or None; all that exist must be whole."""
    saves = []
    for number in store.numbers():
        found = store.manifest(number)
        store.verify(number, found.parts)
        for rank in range(WORKERS):
            read = store.read_part(number, found.parts[rank])
            assert read.keys() == arrays(0, 0).keys()
            for name, value in arrays(found.step, rank).items():
                np.testing.assert_array_equal(read[name], value)
        saves.append(found.step)
    return saves[0] if saves else None


@contextlib.contextmanager
def each_operation(then):
    """Calls `then(number, name, path)` after each operation on the disk."""
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


def in_a_process(directory, saves, kill_at=None, kill_after=None):
    """Saves in a process that is killed; returns the last save that it said was done."""
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
        said = [int(line) for line in file if line.endswith("\n")]
    assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL), "it failed of itself"
    return said[-1] if said else None


def check(directory, said, before):
    """After a kill: the newest one that was said to be saved is there, or the one after it."""
    found = newest(load_store()[0](directory))
    least = before if said is None else said
    assert found is not None or least is None, f"nothing is left of {least}"
    assert found in (least, 0 if least is None else least + 1), (found, least)
    return found


def tidy(directory):
    """The next run leaves nothing behind of one that was killed."""
    store = load_store()[0](directory)
    before = newest(store)
    save_all(store, (-1 if before is None else before) + 2)
    assert len(store.numbers()) <= KEEP
    names = sorted(path.name for path in directory.rglob("*"))
    expected = ["manifest.json", "part-00000.npz", "part-00001.npz"] * len(store.numbers())
    assert [n for n in names if not n.startswith("checkpoint-")] == sorted(expected), names


def everywhere(directory):
    log = []
    with each_operation(lambda _, *operation: log.append(operation)):
        save_all(load_store()[0](directory), 4)
    for at in range(len(log)):
        shutil.rmtree(directory)
        said = in_a_process(directory, 4, kill_at=at)
        check(directory, said, None)
        tidy(directory)
    return len(log)


def whenever(directory, saves, seed):
    chance, found, kills = random.Random(seed), None, 0
    while found is None or found < saves:
        said = in_a_process(directory, 10**9, kill_after=chance.uniform(0.0, 0.03))
        found = check(directory, said, found)
        kills += 1
    tidy(directory)
    return kills


if __name__ == "__main__":
    job, folder, *numbers = sys.argv[1:]
    print({"everywhere": everywhere, "whenever": whenever}[job](Path(folder), *map(int, numbers)))
    assert "tensorflow" not in sys.modules and "keras" not in sys.modules
