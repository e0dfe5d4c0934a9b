"""`rs.world()` and `rs.per_worker_batch()`, from environment variables alone."""

import dataclasses
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest

import tf_redsync as rs
from tests.processes import AS_COMMAND
from tf_redsync.cluster import world


@pytest.fixture
def workers(monkeypatch):
    world._warn.cache_clear()
    monkeypatch.delenv("TF_REDSYNC_RESTART", raising=False)

    def use(count, rank=0):
        addresses = [f"h{i}:1" for i in range(count)]
        task = {"type": "worker", "index": rank}
        config = {"cluster": {"worker": addresses}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    return use


def test_world_without_a_launcher(monkeypatch):
    for name in ("TF_CONFIG", "TF_REDSYNC_RESTART"):
        monkeypatch.delenv(name, raising=False)
    assert rs.world() == world.World(rank=0, size=1, restarts=0)
    assert rs.per_worker_batch(7) == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        rs.world().rank = 1


def test_world_of_the_launcher(workers, monkeypatch):
    workers(3, rank=2)
    monkeypatch.setenv("TF_REDSYNC_RESTART", "4")
    assert dataclasses.astuple(rs.world()) == (2, 3, 4)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "²"])
def test_malformed_restart_count(workers, monkeypatch, text):
    workers(1)
    monkeypatch.setenv("TF_REDSYNC_RESTART", text)
    with pytest.raises(ValueError, match="TF_REDSYNC_RESTART"):
        rs.world()


@pytest.mark.parametrize(("batch", "count", "each"), [(64, 4, 16), (64, 1, 64), (3, 3, 1)])
def test_divisible_batch(workers, batch, count, each):
    workers(count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rs.per_worker_batch(batch) == each


@pytest.mark.parametrize(
    ("batch", "count", "each"), [(64, 3, 21), (65, 3, 22), (5, 4, 1), (10, 4, 3), (7, 4, 2)]
)
def test_indivisible_batch_is_rounded_with_one_warning(workers, batch, count, each):
    workers(count)
    with pytest.warns(UserWarning, match=rf"global_batch={batch}.*\b{each * count}\b") as seen:
        assert [rs.per_worker_batch(batch) for _ in range(3)] == [each] * 3
    assert len(seen) == 1 and seen[0].filename == __file__


def test_batch_of_numpy(workers):
    workers(4)
    assert repr(rs.per_worker_batch(np.int64(64))) == "16"


@pytest.mark.parametrize("batch", [3, 0, -8, 8.0, "8", True, None, np.float32(8)])
def test_bad_batch(workers, batch):
    workers(4)
    with pytest.raises(ValueError, match="global_batch"):
        rs.per_worker_batch(batch)


def test_launcher_sets_the_world(tmp_path):
    path = tmp_path / "train.py"
    body = "from tf_redsync.cluster.world import world\nprint(*vars(world()).values())\n"
    path.write_text(AS_COMMAND + body)
    ran = subprocess.run(
        [sys.executable, "-m", "tf_redsync", "launch", "-n", "2", "--isolate", "no", str(path)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert sorted(ran.stdout.splitlines()) == ["[worker 0] 0 2 0", "[worker 1] 1 2 0"], ran.stderr
