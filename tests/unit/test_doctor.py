"""The report of `python -m tf_redsync doctor`."""

import json
import shlex
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import native_ops
from tf_redsync import ops
from tf_redsync.cli import doctor, launch, self_test


@pytest.fixture
def no_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TF_REDSYNC_BACKEND", raising=False)


def test_json(no_config, capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["numpy"] == np.__version__
    assert report["devices"]["CPU"] == len(tf.config.list_physical_devices("CPU"))
    assert report["collectives"] == "TensorFlow's ring, over gRPC"
    assert report["tf_config"] == {"set": False}
    for chosen in report["ops"].values():
        assert chosen["CPU"] == {"backend": ops.backend(), "reason": ops.backend_reason()}
    if ops.backend() == "native":
        assert report["library"]["built_for"] == tf.__version__
        assert report["library"]["simd"] in ("plain", "avx2", "avx512")
        assert report["library"]["problem"] is None
        gpu = report["library"]["gpu"]
        assert gpu.startswith(("CUDA ", "none: "))
        on_gpus = "native" if gpu.startswith("CUDA ") else "tensorflow"
        assert all(chosen["GPU"]["backend"] == on_gpus for chosen in report["ops"].values())
        assert sorted(report["ops"]) == sorted(native_ops())


def test_text(no_config, capsys, monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:2", "c:3"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert f"{tf.__version__}" in out and "3 worker" in out and "'index': 1" in out
    assert all(op in out for op in doctor.OPS) and ops.backend_reason() in out
    assert f"{ops.backend()} on CPU" in out and "why on GPU" in out


def test_modules_compiled_at_every_start_are_named(monkeypatch, tmp_path):
    package = tmp_path / "keras"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr("keras.__file__", str(package / "__init__.py"))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert doctor.bytecode() == "compiled once"
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    advice = doctor.bytecode()
    assert "at every start" in advice and "PYTHONDONTWRITEBYTECODE" in advice
    command = advice[advice.index("Run ") + 4 : advice.rindex(" once")]
    subprocess.run(shlex.split(command), check=True, timeout=60)
    assert doctor.bytecode() == "compiled once"


def test_cuda_compiler_is_that_of_the_build(monkeypatch, tmp_path):
    """Without CUDA_HOME the build takes the nvcc of /usr/local/cuda if PATH has none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_CUDA_FOLDER", str(tmp_path))
    assert doctor.cuda_compiler().startswith("none (") and str(folder) in doctor.cuda_compiler()
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\necho nvcc\necho release 13.0\n")
    nvcc.chmod(0o755)
    assert doctor.cuda_compiler() == "release 13.0"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert doctor.cuda_compiler().startswith("none (")


def test_gpu_section(no_config, monkeypatch):
    monkeypatch.setattr(ops, "backend", lambda: "native")
    monkeypatch.setattr(ops, "backend_reason", lambda: "it is there")
    monkeypatch.setattr(ops.native, "gpu_build", lambda: "none: there is no nvcc in PATH")
    for chosen in doctor.backends().values():
        assert chosen["CPU"]["backend"] == "native" and chosen["GPU"]["backend"] == "tensorflow"
        assert chosen["GPU"]["reason"] == "the library has no GPU kernels: there is no nvcc in PATH"
    monkeypatch.setattr(ops.native, "gpu_build", lambda: "CUDA 12.4: sm_90")
    for chosen in doctor.backends().values():
        assert chosen["GPU"]["backend"] == "native"
        assert "sm_90" in chosen["GPU"]["reason"]
    monkeypatch.setattr(doctor, "devices", lambda: {"CPU": 1, "GPU": 2})
    monkeypatch.setattr(ops.native, "gpu_problem", lambda: "")
    assert doctor.backends()["decode"]["GPU"]["backend"] == "native"
    monkeypatch.setattr(ops.native, "gpu_problem", lambda: "GPU 1: no kernel image")
    chosen = doctor.backends()["decode"]["GPU"]
    assert chosen["backend"] == "tensorflow" and chosen["reason"].endswith("GPU 1: no kernel image")
    monkeypatch.setattr(ops, "backend", lambda: "tensorflow")
    assert doctor.backends()["decode"]["GPU"]["reason"] == "it is there"


ABC = '{"cluster": {"worker": "abc"}, "task": {"type": "worker", "index": 0}}'  # not a list


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", "[" * 100_000, '{"cluster": 5}', ABC])
def test_malformed_config_is_reported(no_config, capsys, monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    assert doctor.main([]) == 0
    assert "TF_CONFIG is malformed" in capsys.readouterr().out


def test_each_worker_of_the_check_uses_one_visible_gpu(monkeypatch):
    chosen = []

    def run(*args, worker_env, **options):
        chosen.append([own["CUDA_VISIBLE_DEVICES"] for own in worker_env])
        return launch.LaunchResult((), 1, "")

    monkeypatch.setattr(launch, "run", run)
    name = "CUDA_VISIBLE_DEVICES"
    for listed, count in (("3,5,7,9", 4), ("3", 1), (None, 4)):
        monkeypatch.setenv(name, listed) if listed else monkeypatch.delenv(name)
        self_test.run(count)
    assert chosen[::2] == [["-1", "-1"]] * 3
    assert chosen[1::2] == [["3", "5"], ["3", "3"], ["0", "1"]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_empty_name_of_the_compiler_is_the_default(monkeypatch):
    monkeypatch.setenv("CXX", "")
    assert doctor.compiler().startswith("g++")


def test_unusable_installation_is_reported(no_config, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(ops.native, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setattr(ops.native, "load", lambda: ops.native.check(tmp_path / "missing.so"))
    monkeypatch.setenv("TF_REDSYNC_BACKEND", "native")
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    ops.set_backend(None)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "none (" in out and "no-compiler" in out and "no-cuda" in out
    assert "There is no native library" in out and "TF_REDSYNC_BACKEND=tensorflow" in out


def test_collective_implementation_with_gpus():
    assert doctor.carrier(2).startswith("NCCL")
