"""Loaded files are data: no file runs code that the program has not named itself."""

import ast
import io
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tf_redsync import config
from tf_redsync.state import saveable_exchange

PACKAGE = Path(rs.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
# A restarted worker runs the user's own script, as the interpreter would.
ALLOWED_CALLS = {"cli/spare.py": {"exec", "compile"}}
# Functions of a notebook reach its workers through files in a private folder.
ALLOWED_MODULES = {
    "cli/notebook.py": {"cloudpickle", "pickle"},
    "cli/notebook_worker.py": {"cloudpickle", "pickle"},
}
EVIL = """
import pathlib
pathlib.Path({trace!r}).write_text("this ran")

class Evil:
    def __init__(self, **arguments): pass

    @classmethod
    def from_config(cls, config): return cls()
"""


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Returns a file that exists once the importable module `evil_module` has been imported."""
    path = tmp_path / "trace"
    (tmp_path / "evil_module.py").write_text(EVIL.format(trace=str(path)))
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("evil_module", None)


EVIL_CONFIG = {
    "module": "evil_module",
    "class_name": "Evil",
    "registered_name": "evil_module>Evil",
    "config": {},
}


def test_trap_works(trace):
    __import__("evil_module")
    assert trace.exists()


@loop("name", ["Evil", "evil_module.Evil", "evil_module>Evil", "os.system", "builtins.eval"])
def test_config_resolves_registered_classes_only(trace, name):
    with pytest.raises(ValueError, match="`class_name` must be one of"):
        config.from_config({**EVIL_CONFIG, "class_name": name})
    assert not trace.exists()


@loop("part", ["inner_optimizer", "method"])
@loop("family", ["keras", "tf_keras"])
def test_optimizer_config_imports_nothing(trace, family, part):
    library = {"keras": keras, "tf_keras": tf_keras}[family]
    optimizer = rs.DistributedOptimizer(library.optimizers.SGD(0.1), rs.RedSync(density=0.1))
    saved = optimizer.get_config()
    assert type(optimizer).from_config({**saved}).get_config() == saved
    with pytest.raises((ValueError, TypeError)):
        type(optimizer).from_config({**saved, part: EVIL_CONFIG})
    assert not trace.exists() and "evil_module" not in sys.modules


@loop("way", ["custom_objects", "registered"])
@loop("family", ["keras", "tf_keras"])
def test_own_class_loads_without_its_module(trace, family, way):
    """A script was moved: the file names the old module, which may be anything now."""
    library = {"keras": keras, "tf_keras": tf_keras}[family]
    own = type("Own", (library.optimizers.SGD,), {"__module__": "evil_module"})
    if way == "registered":
        own = library.saving.register_keras_serializable("tests")(own)
    optimizer = rs.DistributedOptimizer(own(0.1), rs.RedSync(density=0.1))
    saved, objects = optimizer.get_config(), {"Own": own} if way == "custom_objects" else None
    loaded = type(optimizer).from_config(saved, custom_objects=objects)
    assert type(loaded.inner_optimizer) is own and loaded.get_config() == saved
    names = {"function": EVIL_CONFIG["registered_name"], "Evil": None}
    for class_name, registered_name in names.items():
        evil = {**EVIL_CONFIG, "class_name": class_name, "registered_name": registered_name}
        with pytest.raises(ValueError, match="custom_objects"):
            evil_objects = {"Evil": own, EVIL_CONFIG["registered_name"]: own}
            type(optimizer).from_config({**saved, "inner_optimizer": evil}, evil_objects)
    assert not trace.exists() and "evil_module" not in sys.modules


def test_public_class_asks_the_registry_of_the_configs_family(trace):
    """Keras 3 knows the name, but tf_keras, which loads this config, would import the module."""
    keras.saving.register_keras_serializable("keras3")(type("Known", (), {"get_config": None}))
    saved = rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense()).get_config()
    saved["inner_optimizer"] = {
        **EVIL_CONFIG,
        "registered_name": "keras3>Known",
        "config": {"is_legacy_optimizer": False},
    }
    with pytest.raises(ValueError, match="not imported"):
        rs.DistributedOptimizer.from_config(saved)
    assert not trace.exists()


class Payload:
    """Unpickling it writes a file."""

    def __init__(self, trace):
        self._trace = trace

    def __reduce__(self):
        return Path.write_text, (self._trace, "this ran")


def archive(**arrays) -> bytes:
    data = io.BytesIO()
    np.savez(data, allow_pickle=True, **arrays)
    return data.getvalue()


def test_checkpoint_state_is_read_without_pickle(trace):
    payload = np.array([Payload(trace)], dtype=object)
    data = archive(step=np.int64(3), residual=payload)
    exchange = types.SimpleNamespace(
        step=tf.constant(0, tf.int64),
        strategy=tf.distribute.get_strategy(),
        schedule=types.SimpleNamespace(settle=lambda: None),
    )
    with pytest.raises(ValueError, match="allow_pickle=False"):
        saveable_exchange.SnapshotState(lambda: exchange).deserialize(data)
    assert not trace.exists()
    np.load(io.BytesIO(data), allow_pickle=True)["residual"]  # the trap works
    assert trace.exists()


@loop("module", sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")))
def test_no_module_loads_code_from_files(module):
    modules = FORBIDDEN_MODULES - ALLOWED_MODULES.get(module, set())
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & modules, module
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in modules, module
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            forbidden = FORBIDDEN_CALLS - ALLOWED_CALLS.get(module, set())
            assert called not in forbidden, (module, called)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "np.load":
                assert options.get("allow_pickle") == "False", module
            if called == "np.savez":  # numpy 1.26 would save an array of that name
                assert "allow_pickle" not in options, module
