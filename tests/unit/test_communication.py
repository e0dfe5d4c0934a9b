"""The choice of NCCL or gRPC for GPU collectives: by GPU UUIDs, equal on all workers."""

import subprocess

import pytest
import tensorflow as tf

from tf_redsync.network import transport
from tf_redsync.network.transport import (
    Implementation,
    Options,
    as_text,
    choose,
)

DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { return STATUS + flags; }
int cuDeviceGetUuid(char* uuid, int device) {
  memset(uuid, 0, 16);
  uuid[0] = 0x10 + device;
  return device == 2 ? 101 : 0;
}
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Builds stubs of NVIDIA's driver library: one works, one fails in `cuInit`."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    for status in (0, 100):
        command = ["gcc", "-shared", "-fPIC", f"-DSTATUS={status}", "driver.c", "-o"]
        subprocess.run([*command, f"libcuda_{status}.so"], cwd=folder, check=True)
    return [str(folder / f"libcuda_{status}.so") for status in (0, 100)]


@pytest.fixture
def three_gpus(monkeypatch):
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in (0, 1, 2)]
    monkeypatch.setattr(transport, "_visible_gpus", lambda: gpus)


def test_gpus_are_identified_by_uuid(drivers, three_gpus):
    found = transport.own_gpus(drivers[0])
    assert found == ["10" + 15 * "00", "11" + 15 * "00", ""]


def test_driver_failure_gives_no_uuids(drivers, three_gpus):
    assert transport.own_gpus(drivers[1]) == ["", "", ""]
    assert transport.own_gpus("libno_such_driver.so") == ["", "", ""]


def test_no_gpus():
    assert transport.own_gpus("libno_such_driver.so") == []


AUTO, RING, NCCL = Implementation.AUTO, Implementation.RING, Implementation.NCCL


@pytest.mark.parametrize(
    ("asked", "gpus", "taken"),
    [
        (AUTO, [[], []], AUTO),
        (AUTO, [["a"], ["b"]], NCCL),
        (AUTO, [["a", "b"], ["c", "d"]], NCCL),
        (AUTO, [["a"], ["b"], ["a"]], AUTO),
        (AUTO, [["a", "a"], ["b", "c"]], AUTO),  # MIG slices of one GPU
        (AUTO, [[""], [""]], NCCL),  # unknown GPUs
        (RING, [["a"], ["b"]], RING),
        (RING, [["a"], ["a"]], RING),
        (NCCL, [["a"], ["b"]], NCCL),
        (RING, [[], []], RING),
    ],
)
def test_chosen_implementation(asked, gpus, taken, caplog):
    options = Options(implementation=asked)
    choose(options, [as_text(of_worker) for of_worker in gpus])
    assert options.implementation is taken
    falls_back = asked is AUTO and taken is AUTO and gpus[0]
    assert ("share a GPU" in caplog.text) == bool(falls_back)


@pytest.mark.parametrize("asked", [AUTO, RING])
@pytest.mark.parametrize(
    ("gpus", "warns"),
    [
        ([["a", "b"], ["a", "b"]], True),
        ([["a"], ["a"]], False),
        ([["a", "b"], ["c", "d"]], False),
        ([["a", "a"], ["b", "c"]], False),
    ],
)
def test_replicas_of_several_workers_on_one_gpu_cause_a_warning(asked, gpus, warns, caplog):
    choose(Options(implementation=asked), [as_text(of_worker) for of_worker in gpus])
    assert ("CUDA_VISIBLE_DEVICES" in caplog.text) == warns


@pytest.mark.parametrize(
    ("asked", "gpus", "text"),
    [
        (NCCL, [[], []], "the workers have no GPUs. Received: implementation=NCCL"),
        (NCCL, [["a"], ["b"], ["a"]], "workers 0, 2 share a GPU.*RING"),
        (AUTO, [["a"], []], "same number of GPUs.*worker 0: 1, worker 1: 0.*CUDA_VISIBLE_DEVICES"),
        (RING, [["a"], ["b", "c"]], "worker 0: 1, worker 1: 2"),
    ],
)
def test_impossible_request_raises(asked, gpus, text):
    with pytest.raises(ValueError, match=text):
        choose(Options(implementation=asked), [as_text(of_worker) for of_worker in gpus])


def test_user_options_are_unchanged():
    given = Options(bytes_per_pack=5)
    own = transport.copied(given)
    choose(own, [as_text(["a"]), as_text(["b"])])
    assert (own.implementation, own.bytes_per_pack) == (NCCL, 5)
    assert given.implementation is AUTO


def test_nccl_is_ignored_on_cpus():
    assert transport.by_nccl(Options(implementation=NCCL), "/job:w/device:GPU:0")
    assert not transport.by_nccl(Options(implementation=NCCL), "/job:w/device:CPU:0")
    assert not transport.by_nccl(Options(), "/job:w/device:GPU:0")
