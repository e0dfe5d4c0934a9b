"""The checkpoint store after kills, full disks, damage and foreign files."""

import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
from contextlib import nullcontext
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tf_redsync as rs
from tests.unit import checkpoint_saves as saves
from tf_redsync import config
from tf_redsync.state import checkpoint_files, checkpoint_manifest
from tf_redsync.state.checkpoint_manifest import Manifest, Refused
from tf_redsync.state.checkpoint_store import Store


@pytest.fixture
def memory():
    """Creates a directory in memory, since these tests end processes, not machines."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder) / "checkpoints"


def kill(*arguments):
    done = subprocess.run(
        [sys.executable, saves.__file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert not done.returncode, done.stdout + done.stderr
    return int(done.stdout)


def saved(directory, count=2):
    store = Store(directory)
    saves.save_all(store, count)
    return store


# ------------------------------------------------------------------------------------- interrupted


def test_kill_after_every_file_operation(memory):
    assert kill("every_operation", memory) > 50


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.deep)])
def test_kill_at_random_times(memory, count):
    assert kill("random_times", memory, count, 1) >= count / 20


def test_search_detects_an_early_manifest(memory, monkeypatch):
    """A deliberate fault: the manifest is written before its parts."""
    monkeypatch.setattr(checkpoint_manifest, "NAME", "part-00001.npz")
    with pytest.raises((Refused, AssertionError)):
        saves.newest(saved(memory))


def test_contents_are_flushed_before_and_names_after_a_rename(memory):
    log = []

    def note(_, name, path):
        if name == "fsync":  # of an open file
            path = os.readlink(f"/proc/self/fd/{path}")
        log.append((name, str(path)))

    with saves.each_operation(note):
        saved(memory)
    renamed = [i for i, (name, _) in enumerate(log) if name == "replace"]
    assert len(renamed) == 7  # a token, four parts, two manifests
    for i in renamed:
        path = log[i][1]
        assert path.endswith(".part"), "renamed before it was complete"
        assert log[i - 1] == ("fsync", path) and log[i + 1] == ("fsync", os.path.dirname(path))
    assert not any(log[i][1].endswith(".part") for i in range(len(log)) if log[i][0] == "unlink")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_disk_error_at_any_operation_keeps_the_previous_checkpoint(memory, code):
    def fail(at):
        def then(number, name, path):
            if number == at:
                raise OSError(code, os.strerror(code))

        return then

    tried = 0
    for at in range(100):
        directory = memory / str(at)
        store = saved(directory)
        try:
            with saves.each_operation(fail(at)) as done:
                saves.save_all(store, 3)
        except OSError as error:
            assert error.errno == code
        assert saves.newest(store) in (1, 2)
        saves.save_all(store, 4)
        assert saves.newest(store) == 3
        tried += done[0] > at
    assert 10 < tried < 100


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_only_file_systems_that_cannot_flush_directories_may_fail(memory, monkeypatch, code):
    flush = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    if code == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(code)):
            saved(memory)
    else:
        assert saves.newest(saved(memory, 3)) == 2


def test_disk_errors_name_the_path_and_a_remedy(memory):
    memory.mkdir()
    (memory / "file").write_text("")
    with pytest.raises(OSError, match=r"file/x.*file.*`Checkpoint`"):
        Store(memory / "file" / "x").leave_token("job", 0)
    with pytest.raises(OSError, match=r"/proc/checkpoints.*`Checkpoint`"):
        Store("/proc/checkpoints").leave_token("job", 0)


# ----------------------------------------------------------------------------------------- damaged


def _truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _format(number):
    def change(path):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "format": number}))

    return change


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("part-00001.npz", _truncate, "part-00001.npz has .* bytes, and .* were written"),
        ("part-00000.npz", _flip, "part-00000.npz .*SHA-256"),
        ("part-00001.npz", Path.unlink, "part-00001.npz is missing"),
        ("manifest.json", _truncate, "manifest.json"),
        ("manifest.json", _flip, "manifest.json"),
        ("manifest.json", _format(2), "newer.*format=2"),
        ("manifest.json", _format(0), "another.*format=0"),
    ],
)
def test_damaged_checkpoint_is_rejected(memory, file, damage, words):
    store = saved(memory)
    newest, before = store.numbers()
    damage(store.path(newest) / file)
    with pytest.raises(Refused, match=words):
        store.verify(newest, store.manifest(newest).parts)
    store.verify(before, store.manifest(before).parts)


# Invalid contents of a manifest with a valid checksum: the value that replaces another one.
WRONG = {
    "epoch": ["3", 2.0, True, None, -1, 1 << 63, [], float("nan")],
    "step": ["3", {}, -1],
    "batch": ["0", -1],
    "first_epoch": [5, "0"],
    "finished": [-1, None],
    "reason": [3, None],
    "versions": [[], {"numpy": 2}, "2"],
    "parts": [[], {}, None, "parts", [None], [[]]],
    "parts.0": [None, {}, {"rank": 0}],
    "parts.1.rank": ["../../..", 0, 7, 1.0, True, None],
    "parts.1.size": ["9", -1, None],
    "parts.1.sha256": ["", "../x", 5, "A" * 64],
    "parts.1.whole": [1, "yes", None],
    "parts.1.path": ["/etc/passwd"],
    "subject": [None, [], {}, {"kind": {}}],
    "subject.kind": [[], {"method": 3}, None],
    "subject.options": [{}, None, "density"],
    "subject.more": [1],
    "subject.variables": [[], None, {"model": None}, {"model": [["w"]]}, {"model": "w"}],
    "subject.variables.model.0.1": [3, None],
    "subject.variables.model.0.2": [None, ["50"], [2.0], [-2], 50],
    "more": [1],
}


@pytest.mark.parametrize("place", WRONG)
def test_manifest_of_another_form_is_rejected(memory, place):
    """The checksum is valid; a part's path must stay in its folder."""
    store = saved(memory, 1)
    path = store.path(1) / checkpoint_manifest.NAME
    good = path.read_text()
    for wrong in WRONG[place]:
        path.write_text(good)
        saves.rewrite(path, place, wrong)
        with pytest.raises(Refused, match="manifest.json is malformed"):
            store.manifest(1)
    path.write_text(good)
    saves.rewrite(path, "epoch", 3)
    assert store.manifest(1).epoch == 3


def _replaced(make):
    def replace(path):
        path.unlink()
        make(path)

    return replace


@pytest.mark.parametrize("name", ["manifest.json", "part-00001.npz"])
@pytest.mark.parametrize(
    "damage",
    [
        _replaced(os.mkfifo),
        _replaced(os.mkdir),
        _replaced(lambda path: path.symlink_to("/dev/zero")),
        _replaced(lambda path: path.symlink_to(path)),
        lambda path: os.truncate(path, 400 << 20),
    ],
    ids=["pipe", "directory", "device", "loop", "large"],
)
def test_special_and_large_files_are_rejected_at_once(memory, name, damage):
    store = saved(memory, 2)
    damage(store.path(2) / name)
    if name != checkpoint_manifest.NAME:
        size = _size_of(store.path(2) / name)
        saves.rewrite(store.path(2) / checkpoint_manifest.NAME, "parts.1.size", size)
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match=name):
            store.verify(2, store.manifest(2).parts)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    store.verify(1, store.manifest(1).parts)


def _size_of(path):
    """Returns the size that a manifest adapted to the file would have."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


LOOKS = ("stat", "lstat", "listdir", "scandir", "open")


def fail_looks(monkeypatch, error_of):
    """Makes functions of `os` raise the result of `error_of(path)`, unless it is None."""

    def patched(look):
        def run(path=".", *args, **kwargs):
            error = error_of(str(path))
            if error is not None:
                raise error
            return look(path, *args, **kwargs)

        return run

    for name in LOOKS:
        monkeypatch.setattr(os, name, patched(getattr(os, name)))


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO, errno.ELOOP])
def test_checkpoint_that_cannot_be_looked_at_is_listed_and_rejected(memory, monkeypatch, code):
    store = saved(memory)
    parts, reason = store.manifest(2).parts, os.strerror(code)
    put(store.path(3) / "part-00000.npz")
    with monkeypatch.context() as patch:
        fail_looks(patch, lambda p: OSError(code, reason) if store.path(2).name in p else None)
        assert store.numbers() == [2, 1]
        assert list(store.here(2, parts)) == list(parts)
        with pytest.raises(Refused, match=f"manifest.json cannot be read: {reason}"):
            store.manifest(2)
        with pytest.raises(Refused, match=f"part-00000.npz cannot be read: {reason}"):
            store.verify(2, parts)
        assert store.remove_leftovers() == ["checkpoint-000003"]
    assert saves.newest(store) == 1


def test_stale_listing_removes_no_checkpoint(memory, monkeypatch):
    store, listed = saved(memory), os.listdir
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda p: [n for n in listed(p) if n != "manifest.json"])
        assert store.remove_leftovers() == []
    assert store.numbers() == [2, 1]
    store.verify(2, store.manifest(2).parts)


def test_link_to_a_missing_disk_is_listed_and_rejected(memory):
    store = saved(memory)
    store.path(2).rename(memory.parent / "moved")
    store.path(2).symlink_to(memory.parent / "moved")
    assert saves.newest(store) == 1
    (memory.parent / "moved").rename(memory.parent / "away")
    assert store.numbers() == [2, 1]
    with pytest.raises(Refused, match=r"manifest.json cannot be read"):
        store.manifest(2)
    assert not store.remove_leftovers() and store.path(2).is_symlink()


def test_error_of_any_look_removes_no_checkpoint(memory, monkeypatch):
    store, looks = saved(memory), 0
    for at in range(100):
        looks = 0

        def error(path, at=at):
            nonlocal looks
            looks += 1
            return OSError(errno.ESTALE, "stale") if looks == at + 1 else None

        with monkeypatch.context() as patch, contextlib.suppress(OSError):
            fail_looks(patch, error)
            store.remove_leftovers()
        assert store.numbers() == [2, 1] and saves.newest(store) == 1
        if looks <= at:
            break
    assert 3 < at < 99


def test_arrays_larger_than_their_file_are_rejected(memory):
    """A small file would be unpacked into a large array."""
    memory.mkdir()
    path = memory / "a.npz"
    np.savez_compressed(path, a=np.zeros(50 << 20, np.uint8), dtypes=np.frombuffer(b"{}", np.uint8))
    size = path.stat().st_size
    assert size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a.npz cannot be read"):
            checkpoint_files.read_arrays(path, size)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "named", [b"[]", b'{"a": 3}', b'{"a": "no such dtype"}', b"{", b'{"a": "O"}']
)
def test_invalid_dtype_names_are_rejected(tmp_path, named):
    values = {"arrays/a": np.zeros(2), "dtypes": np.frombuffer(named, np.uint8)}
    np.savez(tmp_path / "a.npz", **values)
    with (
        pytest.raises(ValueError, match="a.npz cannot be read") if named != b"[]" else nullcontext()
    ):
        assert checkpoint_files.read_arrays(tmp_path / "a.npz", 10_000)["a"].shape == (2,)


def test_each_bit_of_a_manifest_is_checked(memory):
    store = saved(memory, 1)
    path = store.path(1) / checkpoint_manifest.NAME
    good, found = path.read_bytes(), store.manifest(1)
    for place in range(0, len(good), 3):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        try:
            assert store.manifest(1) == found  # a space was a space
        except Refused:
            pass


def test_old_checkpoints_are_removed_and_foreign_files_kept(memory):
    store = saved(memory, 3)
    assert store.numbers() == [3, 2]
    path = store.path(7)
    path.mkdir()
    other = Manifest(1, 1, 0, (), saves.SUBJECT | {"kind": {"method": "DGC"}, "variables": {}}, {})
    store.commit(7, other)
    store.remove_old(1, saves.SUBJECT)
    assert store.numbers() == [7, 3]
    store.remove_old(1, saves.SUBJECT, refused=[3])
    assert store.numbers() == [7, 3]
    (store.path(3) / "part-00000.npz.part").write_text("")
    store.path(8).mkdir()
    (store.path(8) / "part-00000.npz").write_text("")
    assert store.next_number() == 9
    removed = store.remove_leftovers()
    assert sorted(removed) == ["checkpoint-000003/part-00000.npz.part", "checkpoint-000008"]
    assert store.numbers() == [7, 3] and store.next_number() == 8


# ------------------------------------------------------------------------------- foreign files


def content(folder):
    """Returns a folder's contents: the bytes of files, the targets of links, and directories."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def put(path, text="not ours"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def hugging_face(folder, elsewhere):
    for name in ("model.safetensors", "trainer_state.json", "part-00000.npz"):
        put(folder / "checkpoint-100000" / name)
    put(folder / "checkpoint-500" / "part-00000.npz")  # not a name that the store uses


def link(folder, elsewhere):
    for name in ("part-00000.npz", "part-00001.npz.part"):
        put(elsewhere / name)
    (folder / "checkpoint-000017").symlink_to(elsewhere)


def link_to_a_checkpoint(folder, elsewhere):
    """The user has moved a checkpoint to another disk: the store reads it but never removes it."""
    path = folder / "checkpoint-000002"
    path.rename(elsewhere / "moved")
    put(elsewhere / "moved" / "part-00000.npz.part")
    path.symlink_to(elsewhere / "moved")


def links_and_folders_in_one(folder, elsewhere):
    put(elsewhere / "data.npz")
    path = folder / "checkpoint-000017"
    path.mkdir()
    (path / "part-00000.npz").symlink_to(elsewhere / "data.npz")
    put(folder / "checkpoint-000018" / "part-00000.npz" / "data")
    (folder / "checkpoint-000019").write_text("a file")
    os.mkdir(folder / "checkpoint-000020")
    os.mkfifo(folder / "checkpoint-000020" / "part-00000.npz")


def notes_in_a_checkpoint(folder, elsewhere):
    put(folder / "checkpoint-000002" / "notes.txt")
    put(folder / "checkpoint-000003" / "results.csv.part")


def like_a_token(folder, elsewhere):
    for name in (".worker-notes", ".worker-group-1", f".worker-{saves.JOB}-0.txt"):
        put(folder / name)
    (folder / f".worker-{saves.JOB}-1").mkdir()


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (hugging_face, 1),
        (link, 1),
        (link_to_a_checkpoint, 1),
        (links_and_folders_in_one, 4),
        (notes_in_a_checkpoint, 2),
        (like_a_token, 0),
    ],
)
def test_foreign_files_are_kept_and_reported_once(memory, make, messages):
    elsewhere = memory.parent / "elsewhere"
    elsewhere.mkdir()
    store = saved(memory, 3)  # two of them are kept, 2 and 3
    own_files = content(memory)
    make(memory, elsewhere)
    before = content(memory), content(elsewhere)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        for _ in range(2):
            store.remove_leftovers()
            store.remove_old(1, saves.SUBJECT)
            for number in range(16, 21):
                store.remove(number)
        for number in store.numbers():
            store.remove(number)
    after = content(memory), content(elsewhere)
    removed = before[0].keys() - after[0].keys()
    assert removed <= own_files.keys() and after[1] == before[1]
    assert all(value == before[0][name] for name, value in after[0].items())
    texts = [str(w.message) for w in warned if "is not removed" in str(w.message)]
    assert len(texts) == len(set(texts)) == messages


def test_removals_are_logged(memory, caplog):
    caplog.set_level("INFO", "tf_redsync")
    store = saved(memory, 3)
    put(store.path(9) / "part-00000.npz")
    put(store.path(3) / "part-00001.npz.part")
    put(memory / f".worker-{saves.JOB}-1")
    caplog.clear()
    assert len(store.remove_leftovers()) == 3
    store.remove_old(1, saves.SUBJECT)
    names = [Path(record.args[0]).name for record in caplog.records]
    assert names == [
        "checkpoint-000009",
        "part-00001.npz.part",
        f".worker-{saves.JOB}-1",
        "checkpoint-000002",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": {"method": "DGC"}}, "another method: .*RedSync.*DGC"),
        (
            {"variables": {"model": []}},
            "another model, .*1 variables.* 0; only one of them has 'w'",
        ),
        (
            {"variables": {"model": [["v", "float32", [3, 4]]]}},
            r"another model: .*w .*float32\[50\].*float32\[3, 4\]",
        ),
        ({"variables": {"model": [["v", "float32", [50]]]}}, "^$"),
    ],
)
def test_mismatched_model_names_the_difference(change, words):
    assert re.search(words, checkpoint_manifest.differences(saves.SUBJECT, saves.SUBJECT | change))


def policy(density, pattern="kernel", end=0.01):
    rule = rs.Rule(pattern=pattern, method=rs.TopK(density=density))
    stages = rs.DensityStages(begins=(0, 5, 9), densities=(0.1, end, 0.001))
    return rs.Policy(rules=(rule,), default=rs.Scheduled(method=rs.TopK(), stages=stages))


def options(*policies, warm_up=None):
    listed = [{"method": config.serialize(p), "warm_up": warm_up} for p in policies]
    return {"options": json.loads(json.dumps(listed))}


@pytest.mark.parametrize(
    ("now", "saved", "texts"),
    [
        (options(policy(0.1)), {"options": []}, []),
        (options(policy(0.1), policy(0.2)), options(policy(0.1), policy(0.2)), []),
        (
            options(policy(0.1, end=0.02), policy(0.1)),
            options(policy(0.1), policy(0.2, pattern="bias")),
            [
                r"default\..*densities\.1: saved 0.01, now 0.02",
                r"rules\.0\..*density: saved 0.2, now 0.1",
                r"rules\.0\..*pattern: saved 'bias', now 'kernel'",
            ],
        ),
        (options(policy(0.1)), options(policy(0.1), warm_up={"class_name": "A"}), ["^warm_up: "]),
        (
            options(policy(0.1)),
            {"options": [{"method": {"config": [3]}, "warm_up": None}]},
            [".", "."],
        ),
        (options(policy(0.1)), {"options": [7]}, ["saved 7"]),
        (options(), {"options": []}, []),
        (
            {"options": [{"warm_up": None}]},
            {"options": [{"warm_up": None, "\x1b[2J\n" + "k" * 10**6: 1}]},
            [r"^\\x1b\[2J\\nk{1,200}: saved 1, now None$"],
        ),
    ],
)
def test_changed_options_are_named_with_both_values(now, saved, texts):
    found = checkpoint_manifest.changed_options(now, saved)
    assert len(found) == len(texts)
    assert all(map(re.search, texts, found)), found


# ------------------------------------------------------------------------------------------ arrays


def test_arrays_of_all_dtypes_round_trip(tmp_path):
    values = {
        "a/b": np.arange(6, dtype=np.int64).reshape(2, 3),
        "flag": np.asarray(True),
        "scalar": np.float32(2.5),
        "half": np.ones([3], ml_dtypes.bfloat16) * 3,
        "eight": np.ones([2, 2], ml_dtypes.float8_e4m3fn),
        "empty": np.zeros([0, 4], np.uint8),
        "dtypes": np.zeros(2),
        "file": np.zeros(1),
    }
    checkpoint_files.write_arrays(tmp_path / "a.npz", values)
    loaded = checkpoint_files.read_arrays(
        tmp_path / "a.npz", 10_000, lambda name: getattr(ml_dtypes, name)
    )
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert loaded[name].tobytes() == value.tobytes()
    assert not list(tmp_path.glob("*.part"))


def test_only_numeric_arrays_are_saved_and_read(tmp_path):
    with pytest.raises(TypeError, match="only numbers can be saved"):
        checkpoint_files.write_arrays(tmp_path / "a.npz", {"a": np.asarray([{}])})
    np.savez(tmp_path / "b.npz", a=np.asarray([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"b.npz cannot be read"):
        checkpoint_files.read_arrays(tmp_path / "b.npz", 10_000)
    assert not (tmp_path / "a.npz").exists()
