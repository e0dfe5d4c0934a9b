"""`rs.` and `rs.contrib.` export the registered methods; both resolve saved names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tf_redsync as rs
from tests.methods import METHODS
from tf_redsync import config, expressions

SOURCE = Path(rs.__file__).read_text(encoding="utf-8")
CHOICES = (
    "Dense NoExchange HalfPrecision BlockQuantized RedSync DGC TopK RandomK RandomBlock GMC "
    "CodedGMC CodedTopK CodedAdam Coded Scheduled SBC CDSGD PowerSGD ACPSGD SignSGD EFSignSGD QSGD "
    "TernGrad LocalSGD DiLoCo StreamingDiLoCo SparseLoCo DeMo"
).split()


def test_core_exports_few_methods():
    assert {n for n in rs.__all__ if n in METHODS} == set(CHOICES)
    assert {n for n in rs.contrib.__all__ if n in METHODS} == METHODS.keys() - set(CHOICES)
    for name in CHOICES:
        assert getattr(rs, name) is METHODS[name] is getattr(rs.methods, name)
        assert METHODS[name].__module__.startswith("tf_redsync.methods.")
    assert dir(rs) == sorted(rs.__all__)


def test_exports_are_visible_to_type_checkers():
    """A new name in `tf_redsync/methods/` needs a typed line there."""
    (block,) = (
        node
        for node in ast.parse(SOURCE).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {}
    for line in block.body:
        (alias,) = line.names
        assert alias.asname == alias.name  # otherwise it would not be exported
        seen[alias.name] = line.module
    assert sorted(seen) == sorted(rs.__all__)
    for name in METHODS.keys() & seen.keys():
        assert seen[name] == METHODS[name].__module__


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(CHOICES)))
def test_contrib_methods_name_their_module(name):
    with pytest.raises(AttributeError, match=rf"rs\.contrib\.{name}\b"):
        getattr(rs, name)
    assert getattr(rs.contrib, name) is METHODS[name]


def test_new_file_is_exported(tmp_path, monkeypatch):
    """`contrib/__init__.py` discovers its modules."""
    (tmp_path / "some_methods").mkdir()
    (tmp_path / "some_methods" / "__init__.py").write_text("")
    (tmp_path / "some_methods" / "fresh.py").write_text(
        "from tf_redsync.config import register\n"
        "from tf_redsync.methods import Dense\n"
        "@register\nclass Fresh(Dense): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(config, "_REGISTRY", config.registered())
    found = rs.methods.catalogue.methods_in("some_methods")
    assert list(found) == ["Fresh"]
    assert "Fresh" in {entry.name for entry in rs.methods.table().entries}


@pytest.mark.parametrize("text", ["SIDCo(density=0.5)", "rs.contrib.SIDCo(density=0.5)"])
def test_command_line_accepts_contrib_methods(text):
    assert expressions.evaluate(text).method == rs.contrib.SIDCo(density=0.5)
    coded = expressions.evaluate("Coded(indices=contrib.codings.Bloom())").method
    assert coded.indices == rs.contrib.codings.Bloom()


@pytest.mark.deep
def test_user_method_with_a_contrib_name_is_rejected():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import tf_redsync as rs\n"
            "@rs.methods.register\nclass SIDCo(rs.Dense): pass",
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "ValueError" in done.stderr and "tf_redsync.contrib.sidco.SIDCo" in done.stderr
