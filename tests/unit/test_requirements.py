"""Errors if TensorFlow or tf_keras is missing or unsupported."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types

import keras
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync import requirements

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_without_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ModuleNotFoundError):
        import tensorflow  # noqa: F401
    with pytest.raises(ImportError, match="`tensorflow-cpu` or `tensorflow.and-cuda.`"):
        requirements.check_tensorflow()
    # An uninstalled package may leave an importable folder behind.
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    with pytest.raises(ImportError, match="`tensorflow-cpu` or `tensorflow.and-cuda.`"):
        requirements.check_tensorflow()


@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_users_file_shadows_a_package(monkeypatch, tmp_path, name):
    (tmp_path / f"{name}.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=re.escape(str(tmp_path / f"{name}.py"))):
        getattr(requirements, f"check_{name}")()


@pytest.mark.parametrize("version", ["2.15.1", "1.99.0", "2.9.0"])
def test_old_tensorflow(monkeypatch, version):
    monkeypatch.setattr(tf, "__version__", version)
    with pytest.raises(ImportError, match=f"2.16 or later. Received: TensorFlow {version}"):
        requirements.check_tensorflow()


@pytest.mark.parametrize("version", ["2.15.0", "3.9.2", "3.10.0", "3.15.1", "3.16.0.dev2026"])
def test_old_keras(monkeypatch, version):
    monkeypatch.setattr(keras, "__version__", version)
    if version in ("2.15.0", "3.9.2"):
        with pytest.raises(ImportError, match=f"3.10 or later. Received: Keras {version}"):
            requirements.check_keras()
    else:
        requirements.check_keras()


def test_muon_of_old_keras(monkeypatch):
    monkeypatch.delattr(keras.optimizers.Muon, "lr_adjust", raising=False)
    with pytest.raises(ImportError, match=f"3.13 or later. Received: Keras {keras.__version__}"):
        rs.Muon(0.1)


@pytest.mark.parametrize("version", ["2.16.0", "2.21.0-rc1", "3.0.0", "2.22.0-dev20260101"])
def test_new_tensorflow(monkeypatch, version, recwarn):
    monkeypatch.setattr(tf, "__version__", version)
    requirements.check_tensorflow()
    warnings = [str(warning.message) for warning in recwarn]
    if version < "2.22":
        assert warnings == []
    else:
        assert len(warnings) == 1 and f"2.16 to 2.21. Received: TensorFlow {version}" in warnings[0]


@pytest.mark.parametrize("program", ["import tf_redsync", "import tf_redsync.cli.main"])
def test_other_systems(program):
    """Modules that only Linux or Unix has must not be imported before the error."""
    code = f"import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; {program}"
    code = f"import sys; sys.orig_argv = ['python', 'tf-redsync']; {code}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "ImportError: tf_redsync needs Linux. Received: win32." in run.stderr


def test_pyproject_has_the_same_ranges():
    text = (ROOT / "pyproject.toml").read_text()
    (low, high) = re.search(r'"tensorflow>=2\.(\d+),<2\.(\d+)"', text).groups()
    assert requirements._OLDEST == (2, int(low)) and requirements._NEWEST == (2, int(high) - 1)
    script = (ROOT / "tools" / "setup_venv.sh").read_text()
    assert f'"$tensorflow>=2.{low},<2.{high}"' in script
    (low,) = re.search(r'"keras>=3\.(\d+)"', text).groups()
    assert requirements._OLDEST_KERAS == (3, int(low))


@pytest.mark.parametrize("installed", ["tensorflow", "tensorflow-cpu"])
def test_tf_keras_advice_does_not_install_a_second_tensorflow(monkeypatch, installed):
    def version(name):
        if name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.18.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(tf, "__version__", "2.18.1")
    message = str(requirements.no_tf_keras())
    assert "pip install 'tf_keras==2.18.*'" in message
    assert ("--no-deps" in message) == (installed != "tensorflow")


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_legacy_keras_without_tf_keras(monkeypatch, recwarn, wanted, installed):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", wanted)
    if not installed:
        monkeypatch.setitem(sys.modules, "tf_keras", None)
    requirements.check_legacy_keras()
    warnings = [str(w.message) for w in recwarn if "TF_USE_LEGACY_KERAS" in str(w.message)]
    assert len(warnings) == (wanted == "1" and not installed)
    assert all("pip install 'tf_keras==" in text for text in warnings)


@pytest.mark.parametrize("missing", ["tf_keras", "tensorflow_addons", None])
def test_failed_load_of_addons_leaves_the_environment_unchanged(monkeypatch, missing):
    """Otherwise later optimizers given by name, and child processes, would be of tf_keras."""
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.delitem(sys.modules, "tensorflow_addons", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(tf, "keras", keras)
    with pytest.raises(ImportError, match=missing or "but it is Keras 3"):
        rs.addons.load()
    assert "TF_USE_LEGACY_KERAS" not in os.environ
