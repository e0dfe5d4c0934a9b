"""Compiles C++ code for tests; results are cached for all clones."""

import os
import pathlib
import shlex
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Compiler:
    """Runs the C++ compiler in the project's root and caches its outputs.

    Args:
        flags: Compiler flags of all calls.
    """

    def __init__(self, flags):
        sys.path.insert(0, str(ROOT / "custom_ops"))  # not a package
        import build_library

        sys.path.remove(str(ROOT / "custom_ops"))
        self._command = [*shlex.split(os.environ.get("CXX", "g++")), *flags]
        if shutil.which(self._command[0]) is None:
            pytest.skip(f"there is no C++ compiler {self._command[0]!r}")
        self._version = build_library.run_compiler([self._command[0], "--version"])
        self._objects = build_library.Objects(fallback=ROOT / "build" / "tests")

    def make(self, *words, objects=()) -> pathlib.Path:
        """Returns the compiler's output for flags and sources.

        Args:
            *words: Arguments of the compiler. Existing files among them are hashed for the cache.
            objects: Results of earlier calls to link with.
        """
        sources = [word for word in words if (ROOT / word).is_file()]
        made_of = [self._version, *self._command, *words, *(path.name for path in objects)]
        path = self._objects.path(sources[0], made_of, *sources[1:])
        self._objects.make(path, [*self._command, *words, *map(str, objects)])
        return path
