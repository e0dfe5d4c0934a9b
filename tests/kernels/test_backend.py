"""Choice of the backend, rejection of another TensorFlow's library, and argument checks."""

import logging
import os

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import needs_native
from tests.loops import loop
from tf_redsync import ops
from tf_redsync.building import libraries
from tf_redsync.ops import native


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    monkeypatch.delenv("TF_REDSYNC_BACKEND", raising=False)
    native._try_native.cache_clear()
    ops.set_backend(None)
    yield
    ops.set_backend(None)
    native._try_native.cache_clear()


@needs_native
def test_native_is_the_default(caplog):
    with caplog.at_level(logging.INFO, "tf_redsync"):
        assert [ops.backend() for _ in range(3)] == ["native"] * 3
    assert len(caplog.records) == 1 and tf.__version__ in caplog.text
    assert tf.__version__ in ops.backend_reason()


@needs_native
def test_outdated_library_is_reported():
    with pytest.raises(ops.NativeLibraryError, match="redsync_new.*build_ext --inplace"):
        native.load().redsync_new()
    assert not hasattr(native.load(), "other")


def test_missing_library_is_reported_once(caplog, monkeypatch, tmp_path):
    def missing():
        native.check(tmp_path / "_redsync_ops.so")

    monkeypatch.setattr(native, "load", missing)
    with caplog.at_level(logging.WARNING, "tf_redsync"):
        assert [ops.backend() for _ in range(3)] == ["tensorflow"] * 3
    assert len(caplog.records) == 1
    assert "no native library" in caplog.text and "TF_REDSYNC_BACKEND=tensorflow" in caplog.text
    assert len(caplog.records[0].getMessage().splitlines()) == 1
    with pytest.raises(ops.NativeLibraryError, match="no native library"):
        ops.set_backend("native")
    monkeypatch.setenv("TF_REDSYNC_BACKEND", "native")
    with pytest.raises(ops.NativeLibraryError, match="no native library"):
        ops.backend()


def test_forced_backend(monkeypatch):
    monkeypatch.setenv("TF_REDSYNC_BACKEND", "tensorflow")
    assert ops.backend() == "tensorflow" and "TF_REDSYNC_BACKEND" in ops.backend_reason()
    monkeypatch.setenv("TF_REDSYNC_BACKEND", "fortran")
    with pytest.raises(ValueError, match="'fortran'"):
        ops.backend()
    with pytest.raises(ValueError, match="'fortran'"):
        ops.set_backend("fortran")
    ops.set_backend("tensorflow")
    assert ops.backend() == "tensorflow"


@needs_native
def test_library_of_another_tensorflow_is_rejected(tmp_path):
    data = native.LIBRARY.read_bytes()
    assert native.built_for() == tf.__version__
    current = f"TENSORFLOW={tf.__version__};".encode()
    assert data.count(current) == 1
    other = tmp_path / "_redsync_ops.so"
    other.write_bytes(data.replace(current, b"TENSORFLOW=" + b"9" * len(tf.__version__) + b";"))
    with pytest.raises(ops.NativeLibraryError) as caught:
        native.check(other)
    for part in ("999", tf.__version__, "Remove the file", "TF_REDSYNC_BACKEND=tensorflow"):
        assert part in str(caught.value)
    other.write_bytes(b"not a library")
    with pytest.raises(ops.NativeLibraryError, match="unknown"):
        native.check(other)


@pytest.fixture
def fresh_library():
    """Resets the process's cached library, now and after the test."""
    kept = native.load, native.library
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.parametrize("machine, version", [(243, tf.__version__), (None, "9.9.9")])  # RISC-V
def test_in_place_build_that_does_not_fit_is_ignored(
    machine, version, fresh_library, caplog, monkeypatch, tmp_path
):
    """A new build starts and fails without a compiler: one line with reason and remedy."""
    other = tmp_path / "_redsync_ops.so"
    head = b"\x7fELF".ljust(18, b"\0") + machine.to_bytes(2, "little") if machine else b""
    other.write_bytes(head + f"REDSYNC_BUILT_FOR_TENSORFLOW={version};".encode())
    monkeypatch.setattr(native, "LIBRARY", other)
    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(libraries, "_version_of_compiler", lambda: None)
    with caplog.at_level(logging.WARNING, "tf_redsync"):
        assert [ops.backend() for _ in range(3)] == ["tensorflow"] * 3
    (line,) = caplog.text.strip().splitlines()
    for part in ("pure TensorFlow", "no-such-compiler", "CXX", "TF_REDSYNC_BACKEND=tensorflow"):
        assert part in line
    with pytest.raises(ops.NativeLibraryError, match="no-such-compiler"):
        ops.set_backend("native")


def test_in_place_build_that_is_older_than_a_source(fresh_library, caplog, monkeypatch, tmp_path):
    built = tmp_path / "_redsync_ops.so"
    built.write_bytes(f"REDSYNC_BUILT_FOR_TENSORFLOW={tf.__version__};".encode())
    monkeypatch.setattr(native, "LIBRARY", built)
    monkeypatch.setattr(libraries, "sources", lambda: tmp_path)
    source, script = tmp_path / "custom_ops" / "core" / "a.cc", tmp_path / "custom_ops" / "a.py"
    preload = tmp_path / "custom_ops" / "preload" / "a.cc"  # goes into another library
    source.parent.mkdir(parents=True)
    preload.parent.mkdir()
    (source.parent / ".#a.cc").symlink_to("me@host.1:2")  # Emacs's lock of a changed file
    for path, time in ((source, 1), (built, 2), (script, 3), (preload, 3)):
        path.touch()
        os.utime(path, (time, time))
    assert native.library() == built and not caplog.records
    native.library.cache_clear()
    os.utime(source, (4, 4))
    assert native.library() == built
    assert str(source) in caplog.text and "setup.py build_ext --inplace" in caplog.text
    assert len(caplog.records) == 1


def test_library_without_sources_is_not_compared(fresh_library, caplog, monkeypatch, tmp_path):
    """Such as one in an image that has only the package."""
    built = tmp_path / "_redsync_ops.so"
    built.write_bytes(f"REDSYNC_BUILT_FOR_TENSORFLOW={tf.__version__};".encode())
    monkeypatch.setattr(native, "LIBRARY", built)
    monkeypatch.setattr(libraries, "sources", lambda: tmp_path)
    assert native.library() == built and not caplog.records


@needs_native
def test_library_that_does_not_load_is_reported_in_one_line(
    fresh_library, caplog, monkeypatch, tmp_path
):
    broken = tmp_path / "_redsync_ops.so"
    broken.write_bytes(f"REDSYNC_BUILT_FOR_TENSORFLOW={tf.__version__};".encode())
    monkeypatch.setattr(native, "LIBRARY", broken)
    with caplog.at_level(logging.WARNING, "tf_redsync"):
        assert ops.backend() == "tensorflow"
    (line,) = caplog.text.strip().splitlines()
    assert "does not load" in line and str(broken) in line and "Remove the file" in line


def test_words_of_a_message():
    layout = ops.MessageLayout.of([7, 5, 0], [False, True, False])
    assert layout.words == 1 + (1 + 14) + (2 + 5) + 1


X = np.zeros(3, np.float32)
GOOD = {
    "grads": [X], "residuals": [X], "velocities": [], "k": [1], "ratios": [-1.0],
    "selectors": ["exact"], "quantized": [False],
}  # fmt: skip


@loop(
    ("change", "error", "text"),
    [
        ({"grads": [], "residuals": [], "selectors": [], "quantized": []}, ValueError, "`grads`"),
        ({"grads": [X.astype(np.float64)]}, TypeError, "grads.0. of float64"),
        ({"residuals": [X.astype(np.float16)]}, TypeError, "residuals.0. of float16"),
        ({"residuals": []}, ValueError, "`residuals`"),
        ({"residuals": [np.zeros(4, np.float32)]}, ValueError, "residuals.0. of shape .4"),
        ({"velocities": [X]}, ValueError, "`velocities`"),
        ({"momentum": 0.9}, ValueError, "`velocities`"),
        ({"momentum": -0.5}, ValueError, "`momentum`.*-0.5"),
        ({"momentum": float("nan")}, ValueError, "`momentum`.*nan"),
        ({"selectors": ["best"]}, ValueError, "'best'"),
        ({"selectors": ["exact", "exact"]}, ValueError, "`selectors`"),
        ({"quantized": []}, ValueError, "`quantized`"),
    ],
)
def test_argument_errors(change, error, text):
    arguments = {**GOOD, **change}
    names = ("grads", "residuals", "velocities", "k", "ratios")
    positional = [arguments.pop(name) for name in names]
    ops.set_backend("tensorflow")
    with pytest.raises(error, match=text):
        ops.accumulate_and_select(*positional, **arguments)


def traced_on(backend, rows):
    @tf.function(input_signature=[tf.TensorSpec([rows, 2**16], tf.float32)])
    def select(x):
        form = {"selectors": ["exact"], "quantized": [False]}
        chosen = ops.accumulate_and_select([x], [x], [], [1], [-1.0], **form)
        return ops.decode(chosen.message[tf.newaxis], chosen.layout, [x])

    ops.set_backend(backend)
    return select.get_concrete_function()


@needs_native
def test_large_tensors():
    """A native selection serves 2^32 - 1 elements, its reference 2^31 - 1; see test_core.py."""
    assert traced_on("native", 2**15).outputs[0].shape == [2**15, 2**16]
    with pytest.raises(ValueError, match="at most 4294967295 .* Split the variable"):
        traced_on("native", 2**16)
    with pytest.raises(
        ValueError, match="at most 2147483647 .* Use the native ops, which take up to 4294967295"
    ):
        traced_on("tensorflow", 2**15)
