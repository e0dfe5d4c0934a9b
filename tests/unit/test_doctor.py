"""The report of `python -m tf_redsync.doctor`."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tf_redsync import doctor, ops


@pytest.fixture
def no_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TF_REDSYNC_BACKEND", raising=False)


def test_json(no_config, capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["numpy"] == np.__version__
    assert report["devices"]["CPU"] == len(tf.config.list_physical_devices("CPU"))
    assert report["tf_config"] == {"set": False}
    assert set(report["ops"]) == {"accumulate_and_select", "decode"}
    for chosen in report["ops"].values():
        assert chosen["backend"] == ops.backend()
    if ops.backend() == "native":
        assert report["library"]["built_for"] == tf.__version__
        assert report["library"]["simd"] in ("plain", "avx2", "avx512")
        assert report["library"]["problem"] is None
        gpu = report["library"]["gpu"]
        assert gpu.startswith(("CUDA ", "none: "))
        on = ["CPU", "GPU"] if gpu.startswith("CUDA ") else ["CPU"]
        assert all(chosen["devices"] == on for chosen in report["ops"].values())


def test_text(no_config, capsys, monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:2", "c:3"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert f"{tf.__version__}" in out and "3 worker" in out and "'index': 1" in out
    assert "accumulate_and_select" in out and ops.backend() in out


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", '{"cluster": 5}'])
def test_malformed_config_is_reported(no_config, capsys, monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    assert doctor.main([]) == 0
    assert "TF_CONFIG is malformed" in capsys.readouterr().out


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
    assert "There is no native library" in out and "pip install" in out
