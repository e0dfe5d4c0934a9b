"""The library and GPUs, on machines without one: registered kernels and fallbacks."""

import logging
import os
import re
import shutil

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from tests.kernels.common import native_ops, needs_native
from tf_redsync import ops
from tf_redsync.ops import native

# The first two shorten the time until the first step of a model with many variables, the others
# serve CPUs with slow casts. On GPUs TensorFlow's ops run instead.
ON_CPUS = {"all_finite", "seal_variables", "half_encode", "half_reduce", "half_decode"}


def devices(op: str) -> set[str]:
    return {k.device_type for k in kernels.get_registered_kernels_for_op(op).kernel}


@needs_native
def test_gpu_kernels_are_registered_if_built():
    assert native.has_gpu_kernels() == native.gpu_build().startswith("CUDA ")
    assert len(native_ops()) >= 10
    for op in native_ops():
        name = "Redsync" + "".join(word.capitalize() for word in op.split("_"))
        on_gpus = native.has_gpu_kernels() and op not in ON_CPUS
        assert devices(name) == ({"CPU", "GPU"} if on_gpus else {"CPU"})


@needs_native
def test_gpu_kernels_are_built_with_nvcc():
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        pytest.skip("no nvcc on PATH or in CUDA_HOME")
    if os.environ.get("TF_REDSYNC_CUDA") == "0":
        pytest.skip("TF_REDSYNC_CUDA is 0")
    assert native.gpu_build().startswith("CUDA ")
    assert re.search(r": sm_\d+.* and PTX", native.gpu_build())  # which ones: test_setup.py


class OnGpu:
    """Has the attributes that the choice reads."""

    device = "/job:localhost/replica:0/task:0/device:GPU:0"


@needs_native
def test_library_without_gpu_kernels_is_not_used_on_gpus(monkeypatch, caplog):
    native._say_no_gpu_kernels.cache_clear()
    monkeypatch.setattr(native, "gpu_build", lambda: "none: there is no nvcc in PATH")
    on_cpu = tf.zeros([3])
    with caplog.at_level(logging.WARNING, "tf_redsync"):
        assert native.serves([on_cpu])
        assert not caplog.records
        assert not native.serves([on_cpu, OnGpu()]) and not native.serves([OnGpu()])
    assert len(caplog.records) == 1, "reported once"
    assert "no nvcc in PATH" in caplog.text and "pure TensorFlow" in caplog.text


@needs_native
def test_kernels_unsupported_by_the_gpus_are_not_used(monkeypatch, caplog):
    native._say_no_gpu_kernels.cache_clear()
    monkeypatch.setattr(native, "gpu_problem", lambda: "the driver is for CUDA 12.2")
    with caplog.at_level(logging.WARNING, "tf_redsync"):
        assert native.serves([tf.zeros([3])]) and not native.serves([OnGpu()])
    assert "(the driver is for CUDA 12.2)" in caplog.text
    choices = []
    anywhere = tf.function(lambda x: choices.append(native.serves([x + x])) or x)
    anywhere(tf.zeros([3]))
    with monkeypatch.context() as visible:
        visible.setattr(tf.config, "get_visible_devices", lambda kind: [OnGpu()])
        anywhere(tf.zeros([4]))  # a tensor without a device, which may be placed on the GPU
    assert choices == [True, False]
    monkeypatch.setattr(native, "gpu_problem", lambda: "")
    assert native.serves([OnGpu()])


@needs_native
def test_gpu_problem_is_reported():
    """CUDA's runtime library reports it; this machine has no driver."""
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    if native.has_gpu_kernels():
        assert native.gpu_problem() == "there is no NVIDIA driver"
    else:
        assert native.gpu_problem() == native.gpu_build().removeprefix("none: ")


@needs_native
def test_reference_runs_without_gpu_kernels(monkeypatch):
    called = []
    monkeypatch.setattr(native, "serves", lambda tensors: bool(called.append(len(tensors))))
    monkeypatch.setattr(native, "load", lambda: None)
    ops.set_backend("native")
    try:
        x, form = [tf.range(5.0)], {"selectors": ["exact"], "quantized": [False]}
        chosen = ops.accumulate_and_select(x, x, [], [2], [-1.0], **form)
        (total,) = ops.decode(chosen.message[tf.newaxis], chosen.layout, x)
    finally:
        ops.set_backend(None)
    assert called == [1, 1] and total.numpy().tolist() == [0, 0, 0, 6, 8]


def test_updates_have_no_order_on_a_gpu_without_kernels(monkeypatch):
    monkeypatch.setattr(native, "gpu_build", lambda: "none: there is no nvcc in PATH")
    assert native.adds_in_order([tf.zeros([3])]) and not native.adds_in_order([OnGpu()])
