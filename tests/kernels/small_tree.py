"""A small copy of the project: few sources, a TensorFlow stub, a compiler that logs calls."""

import os
import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[2]
CXX = os.environ.get("CXX", "g++")
# Just enough to build with.
FAKE_TENSORFLOW = """
__version__ = "9.9.9"
class version:
    GIT_VERSION = "v9"
class sysconfig:
    get_include = staticmethod(lambda: "/nowhere")
    get_compile_flags = staticmethod(lambda: ["-I/nowhere", "-DFROM_TENSORFLOW=1"])
    get_link_flags = staticmethod(list)
"""
SOURCES = {
    "fake.h": "namespace redsync { struct P { const char* name; };"
    " inline P Passes() { return {}; } }",
    "core/cpu/a.cc": '#include "custom_ops/core/cpu/a.h"\nextern "C" const char a[] = A;\n',
    "core/cpu/a.h": '#include "custom_ops/core/cpu/inner.h"\n',
    "core/cpu/inner.h": '#define A "old text of a"\n',
    "kernels/b.cc": 'extern "C" const int b = FROM_TENSORFLOW;\n',
}
FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 99.9, V99.9.1" ;;
  *--list-gpu-arch*) printf 'compute_%s\\n' 75 80 86 87 89 90 ;;
  *--dryrun*) echo "$@" > "$0.dryrun"; echo "#$ LIBRARIES=  \\"-L${0%/*}\\"" >&2 ;;
  *) echo "$@" > "$0.called"; echo "this compiler is broken" >&2; exit 1 ;;
esac
"""
# Its last argument is the output file.
COMPILES = f'for out; do :; done; echo "int k;" | {CXX} -fPIC -x c++ -c - -o "$out" ;;'


def make(folder):
    """Fills a folder; `folder / "compiler"` logs its calls in `folder / "compiled"`."""
    for name in ("pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    for part in ("core/cpu", "core/gpu", "kernels"):
        (folder / "custom_ops" / part).mkdir(parents=True)
    for name in ("sources.bzl", "installed.py", "build_library.py"):
        shutil.copy(ROOT / "custom_ops" / name, folder / "custom_ops")
    version = (ROOT / "custom_ops" / "kernels" / "version.cc").read_text()
    version = version.replace("custom_ops/core/cpu/pass.h", "custom_ops/fake.h")
    for name, text in {**SOURCES, "kernels/version.cc": version}.items():
        (folder / "custom_ops" / name).write_text(text)
    (folder / "fake").mkdir()
    (folder / "fake" / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    compiler(folder, f'echo "$@" >> "{folder}/compiled"\nexec {CXX} "$@"')
    return folder


def compiler(folder, script):
    """Replaces the compiler's script."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def nvcc(folder):
    """Writes a CUDA compiler to `folder / "cuda"` that prints a version and compiles no file."""
    path = folder / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE_NVCC)
    path.chmod(0o755)
    path.with_name("libcudart_static.a").write_text("!<arch>\n")


def repair_nvcc(folder):
    """Makes the CUDA compiler of `nvcc` compile, with the same version."""
    path = folder / "cuda" / "bin" / "nvcc"
    path.write_text(
        path.read_text().replace('echo "this compiler is broken" >&2; exit 1 ;;', COMPILES)
    )


def compiled(folder) -> list[str]:
    """Returns the names of the sources compiled since the last call.

    "kernels.cc" is the source that includes all kernels.
    """
    log = folder / "compiled"
    calls = [line.split() for line in log.read_text().splitlines()]
    log.unlink()
    names = [pathlib.Path(word).name for call in calls for word in call if word[-3:] == ".cc"]
    return sorted(name.split(".")[0] + ".cc" for name in names)
