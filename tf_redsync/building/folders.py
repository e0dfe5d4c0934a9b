"""Where the C++ sources are, and where what is compiled of them is kept."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

CACHE = "TF_REDSYNC_CACHE"  # a folder; else tf_redsync/ in XDG_CACHE_HOME, else in ~/.cache
_PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = {".cc", ".h", ".cu", ".cuh", ".bzl", ".py"}


def cache() -> Path:
    """The folder for libraries and objects; it need not exist."""
    if named := os.environ.get(CACHE):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tf_redsync"


def sources() -> Path:
    """The folder of `custom_ops/`: in an installed package, or beside it in a source tree."""
    carried = _PACKAGE / "_native"
    return carried if carried.is_dir() else _PACKAGE.parent


@functools.cache
def digest_of_sources() -> str:
    """A digest of all that is compiled and of what compiles it."""
    root = sources() / "custom_ops"
    files = sorted(path for path in root.rglob("*") if path.suffix in _KINDS)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
