"""Finds the dependencies of the native library: TensorFlow, and a CUDA compiler if any.

setup.py imports this file. Bazel and tf_redsync/building/ run it with the argument "tensorflow" or
"cuda", and it prints the result as JSON.

The CUDA compiler is `nvcc` in the folder CUDA_HOME/bin if that variable is set, else on PATH, else
in /usr/local/cuda/bin. TF_REDSYNC_CUDA=0 disables it. REDSYNC_CUDA_ARCHITECTURES, such as "80 90",
replaces the list in sources.bzl. Fewer architectures compile faster, but GPUs older than all of
them have no kernels. Architectures that nvcc does not know are omitted; newer GPUs run the PTX of
the newest one. nvcc runs the compiler CXX, unless that has arguments or NVCC_CCBIN names another.
"""

import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile

LISTS = runpy.run_path(str(pathlib.Path(__file__).with_name("sources.bzl")))
TENSORFLOW_TIMEOUT = 300  # seconds; an import takes a few, from a cold disk many
_CUDA_FOLDER = "/usr/local/cuda"
_LAST_LINES = 20
_DESCRIBE = """
import json, tensorflow as tf
print("\\n" + json.dumps({
    "version": tf.__version__,
    "commit": tf.version.GIT_VERSION,
    "include": tf.sysconfig.get_include(),
    "compile_flags": [f for f in tf.sysconfig.get_compile_flags() if not f.startswith("-I")],
    "link_flags": tf.sysconfig.get_link_flags(),
}))
"""


class NativeBuildError(Exception):
    """The native library, or a part of it, cannot be built; the message has the reason."""


def run_compiler(command, cwd=None):
    """Run a compiler; return its standard output and standard error.

    Raises:
        NativeBuildError: The compiler is missing or fails.
    """
    try:
        run = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    except OSError as error:
        raise NativeBuildError(
            f"There is no compiler {command[0]!r} ({error.strerror}). Install one or set CXX."
        ) from error
    if run.returncode != 0:
        lines = "\n".join((run.stderr or run.stdout).strip().splitlines()[-_LAST_LINES:])
        raise NativeBuildError(f"The compiler failed: {shlex.join(command)}\n{lines}")
    return run.stdout + run.stderr


def tensorflow():
    """Return version, headers and flags of the TensorFlow that this interpreter imports.

    Raises:
        NativeBuildError: TensorFlow cannot be imported.
    """
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    # In a child process, because importing TensorFlow here would slow down every command.
    run = subprocess.run(
        [sys.executable, "-c", _DESCRIBE], env=env, cwd=tempfile.gettempdir(), capture_output=True,
        text=True, timeout=TENSORFLOW_TIMEOUT,
    )  # fmt: skip
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise NativeBuildError(
            f"TensorFlow cannot be imported by {sys.executable} ({reason}). Install `tensorflow`, "
            "`tensorflow-cpu` or `tensorflow[and-cuda]` there first, then this project."
        )
    return json.loads(run.stdout.splitlines()[-1])


def _number(architecture):
    """Return the number of an architecture: 90 for "90" and "90a"."""
    return int(architecture.rstrip("af"))


def _invalid_architectures(chosen):
    """Return the result of `cuda` for an invalid REDSYNC_CUDA_ARCHITECTURES."""
    text = (
        "`REDSYNC_CUDA_ARCHITECTURES` must be numbers such as '80 90'. "
        f"Received: REDSYNC_CUDA_ARCHITECTURES={chosen!r}"
    )
    return {"missing": text, "error": text}


def _host_compiler():
    """Return nvcc's flags that choose the compiler CXX; it has no flag for arguments of it."""
    words = shlex.split(os.environ.get("CXX", ""))
    program = shutil.which(words[0]) if len(words) == 1 else None
    return ["-ccbin", program] if program and not os.environ.get("NVCC_CCBIN") else []


def cuda():
    """Return the command and link flags for nvcc, or `{"missing": reason}`."""
    if os.environ.get("TF_REDSYNC_CUDA") == "0":
        return {"missing": "left out by TF_REDSYNC_CUDA=0"}
    home = os.environ.get("CUDA_HOME")
    path = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:{_CUDA_FOLDER}/bin"
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        return {"missing": f"there is no nvcc in {'CUDA_HOME/bin' if home else 'PATH'}"}
    try:
        host = _host_compiler()
        version = run_compiler([nvcc, "--version"])
        known = re.findall(r"compute_(\d+)\b", run_compiler([nvcc, "--list-gpu-arch"]))
        # nvcc may be a script outside of the toolkit, so ask it for its libraries.
        files = ["-c", "-x", "cu", "-o", os.devnull, os.devnull]
        plan = run_compiler([nvcc, *host, "--dryrun", *files])
    except NativeBuildError as error:
        return {"missing": f"{nvcc} does not run", "error": str(error)}
    number = re.search(r"release ([\d.]+)", version)
    line = next((t for t in plan.splitlines() if "LIBRARIES=" in t), "")
    folders = [f for f in shlex.split(line.partition("=")[2]) if f.startswith("-L")]
    chosen = os.environ.get("REDSYNC_CUDA_ARCHITECTURES", "").split()
    if not all(re.fullmatch(r"\d+[af]?", a) for a in chosen):
        return _invalid_architectures(" ".join(chosen))
    wanted = sorted(chosen or LISTS["CUDA_ARCHITECTURES"], key=_number)
    architectures = [a for a in wanted if str(_number(a)) in known]
    older = [a for a in known if _number(a) < _number(wanted[-1])]
    ptx = max(architectures or older, key=_number, default=None)
    if ptx is None:
        return {"missing": f"{nvcc} compiles for none of the GPUs {wanted}, but for {known}"}
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    codes.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    names = ", ".join(f"sm_{a}" for a in architectures) or f"compute_{ptx}"
    return {
        "command": [nvcc, *host, *LISTS["CUDA_FLAGS"], *codes],
        "compiler": version,
        # Before TensorFlow, which exports the names of its own CUDA runtime library.
        "link_flags": [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"],
        "text": f"CUDA {number.group(1) if number else '?'}: {names} and PTX for newer ones",
    }


if __name__ == "__main__":
    try:
        print(json.dumps({"tensorflow": tensorflow, "cuda": cuda}[sys.argv[1]]()))
    except NativeBuildError as problem:
        sys.exit(str(problem))
