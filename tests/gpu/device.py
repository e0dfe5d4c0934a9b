"""The CUDA core through its C interface, on a GPU or in the emulator.

Needs only numpy. Functions take and return numpy arrays; `Device.array` and `Device.get` copy them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("custom_ops/core/gpu/*.cu"))
EMULATE = "-x c++ -std=c++17 -O1 -g1 -ffp-contract=off -fPIC -shared -pthread".split()
EMULATE += "-Wall -Wextra -Werror -Wno-unknown-pragmas -DREDSYNC_GPU_EMULATOR".split()
EMULATE += ["-I.", "-include", "tests/gpu/emulator.h"]
FIBERS = "tests/gpu/fibers.cc"
RACES = "tests/gpu/races.cc"
TRAFFIC = "tests/gpu/traffic.cc"
# As in the library's build, but only for this machine's GPU.
FLAGS = runpy.run_path(str(ROOT / "custom_ops" / "sources.bzl"))["CUDA_FLAGS"]
CUDA = [flag.replace("-fvisibility=hidden,", "") for flag in FLAGS]
SELECTORS = {"exact": 0, "trimmed": 1, "threshold": 2, "fixed": 3}
OK = 0
Pointer, Int64, Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Tensor(ctypes.Structure):
    """RedsyncGpuTensor."""

    _fields_ = [("size", Int64), ("k", Int64), ("selector", Int32), ("quantized", Int32)] + [
        (name, Pointer) for name in ("grad", "residual", "velocity", "new_residual", "new_velocity")
    ]
    _fields_ += [("bfloat16", Int32)]


class Select(ctypes.Structure):
    """RedsyncGpuSelect."""

    _fields_ = [
        ("tensors", ctypes.POINTER(Tensor)),
        ("count", Int64),
        ("momentum", Int32),
        ("masking", Int32),
        ("factor", ctypes.c_float),
        ("seed", ctypes.c_uint32),
    ] + [(name, Pointer) for name in ("scale", "side", "search", "ratios", "new_ratios", "message")]


class Part(ctypes.Structure):
    """RedsyncGpuPart."""

    _fields_ = [("offset", Int64), ("capacity", Int64), ("size", Int64)]
    _fields_ += [("quantized", Int32), ("total", Pointer)]


class Decode(ctypes.Structure):
    """RedsyncGpuSumMessages."""

    _fields_ = [("messages", Pointer), ("ranks", Int64), ("words", Int64)]
    _fields_ += [("parts", ctypes.POINTER(Part)), ("count", Int64)]


class Record(ctypes.Structure):
    """RedsyncGpuRecord."""

    _fields_ = [("position", ctypes.c_uint64), ("value", Int64)]


class Error(ctypes.Structure):
    """RedsyncGpuError."""

    _fields_ = [("field", ctypes.c_char_p)]
    _fields_ += [(name, Int64) for name in ("rank", "tensor", "slot", "value", "limit")]


class Descend(ctypes.Structure):
    """RedsyncGpuDescend."""

    _fields_ = [("indices", Pointer), ("values", Pointer), ("learning_rate", Pointer)]
    _fields_ += [("entries", Int64), ("size", Int64), ("variable", Pointer)]


class Emulated:
    """Host memory as device memory. Every array is its own allocation, for the sanitizer."""

    def __init__(self, library: pathlib.Path):
        self.library = _declare(ctypes.CDLL(str(library)))

    def array(self, host: np.ndarray, misalign: int = 0):
        """Copies an array to the device, `misalign` elements off an aligned address."""
        memory = np.empty(host.size + misalign, host.dtype)[misalign:]  # ends with its allocation
        memory[:] = host.reshape(-1)
        return memory

    def pointer(self, memory) -> int:
        """The address of a device array."""
        return memory.ctypes.data

    def get(self, memory) -> np.ndarray:
        """Copies an array back."""
        return memory.copy()

    def synchronize(self) -> None:
        """Waits for all kernels."""


class Cuda:
    """The first GPU, through the toolkit's CUDA runtime library or a given one."""

    def __init__(self, library: pathlib.Path, runtime=None):
        self.runtime = _runtime() if runtime is None else runtime
        self.library = _declare(ctypes.CDLL(str(library)))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self.runtime.cudaGetErrorString(status).decode())

    def array(self, host: np.ndarray, misalign: int = 0):
        """Copies an array to the device, `misalign` elements off an aligned address."""
        return _CudaArray(self, np.ascontiguousarray(host).reshape(-1), misalign)

    def pointer(self, memory) -> int:
        """The address of a device array."""
        return memory.address

    def get(self, memory) -> np.ndarray:
        """Copies an array back after all earlier kernels."""
        host = np.empty(memory.shape, memory.dtype)
        self._check(self.runtime.cudaMemcpy(host.ctypes.data, memory.address, host.nbytes, 2))
        return host

    def synchronize(self) -> None:
        """Waits for all kernels."""
        self._check(self.runtime.cudaDeviceSynchronize())


class _CudaArray:
    def __init__(self, device: Cuda, host: np.ndarray, misalign: int):
        self.shape, self.size, self.dtype = host.shape, host.size, host.dtype
        self._device = device
        self._base, offset = Pointer(), misalign * host.itemsize
        size = host.nbytes + offset + 4
        device._check(device.runtime.cudaMalloc(ctypes.byref(self._base), size))
        self.address = (self._base.value or 0) + offset
        device._check(device.runtime.cudaMemcpy(self.address, host.ctypes.data, host.nbytes, 1))

    def __del__(self):
        self._device.runtime.cudaFree(self._base)


PROTOTYPE = re.compile(r"REDSYNC_GPU_API\s+([\w\s*]*?)\b(redsync_gpu_\w+)\(([^;]*)\);")
RUNTIME = {
    "cudaMalloc": [Pointer, ctypes.c_size_t],
    "cudaMemcpy": [Pointer, Pointer, ctypes.c_size_t, ctypes.c_int],
    "cudaFree": [Pointer],
    "cudaDeviceSynchronize": [],
    "cudaGetDeviceCount": [Pointer],
    "cudaGetErrorString": [ctypes.c_int],
    "cudaEventCreate": [Pointer],
    "cudaEventRecord": [Pointer, Pointer],
    "cudaEventElapsedTime": [Pointer, Pointer, Pointer],
}  # fmt: skip


def _c_type(text: str):
    """Returns the ctypes type of a result or a parameter."""
    if "*" in text:
        return ctypes.c_char_p if text.split() == ["const", "char*"] else Pointer
    return Int64 if "int64_t" in text else ctypes.c_int


def prototypes() -> dict[str, tuple]:
    """Returns result and parameter types of every function in the C headers."""
    found = {}
    for header in ("c_api.h", "compression_api.h", "bits_api.h", "topk_api.h"):
        text = (ROOT / "custom_ops" / "core" / "gpu" / header).read_text(encoding="utf-8")
        for result, name, parameters in PROTOTYPE.findall(text):
            listed = re.split(r",(?![^(]*\))", parameters)
            types = [] if parameters == "void" else [_c_type(p) for p in listed]
            found[name] = (_c_type(result), types)
    return found


def _declare(library):
    """Declares result and parameter types: ctypes passes plain Python integers as 32 bits."""
    for name, (result, parameters) in prototypes().items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


def declare_runtime(runtime):
    """Declares the types of the CUDA runtime functions in use."""
    for name, parameters in RUNTIME.items():
        getattr(runtime, name).argtypes = parameters
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def nvcc() -> str | None:
    """Returns the CUDA compiler from CUDA_HOME, the search path, or its usual location."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(os.path.join(home, "bin", "nvcc")) if home else None
    return found or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@functools.cache
def _runtime():
    """Returns the CUDA runtime library; raises RuntimeError without one."""
    compiler, places = nvcc(), []
    if compiler:  # It may be a script elsewhere, but it knows the folders of its libraries.
        plan = [compiler, "--dryrun", "-c", SOURCES[0], "-o", os.devnull]
        run = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, timeout=60)
        line = next((t for t in run.stderr.splitlines() if "LIBRARIES=" in t), "")
        folders = [f[2:] for f in shlex.split(line.partition("=")[2]) if f.startswith("-L")]
        places = [str(p) for folder in folders for p in pathlib.Path(folder).glob("libcudart.so*")]
    for place in [*places, "libcudart.so", "libcudart.so.13", "libcudart.so.12"]:
        try:
            runtime = ctypes.CDLL(place)
        except OSError:
            continue
        return declare_runtime(runtime)
    raise RuntimeError("there is no CUDA run-time library (libcudart.so)")


def cuda_problem() -> str | None:
    """Returns the reason why no kernel can run on a GPU here, or None."""
    if nvcc() is None and os.environ.get("REDSYNC_GPU_LIBRARY_KIND") != "cuda":
        return "there is no CUDA compiler (nvcc) on PATH or in CUDA_HOME"
    try:
        runtime = _runtime()
    except RuntimeError as error:
        return str(error)
    count = ctypes.c_int(0)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
        return "CUDA_VISIBLE_DEVICES is -1, the default of these tests; set it to 0 to use a GPU"
    status = runtime.cudaGetDeviceCount(ctypes.byref(count))
    if status != 0:
        return f"no GPU: {runtime.cudaGetErrorString(status).decode()}"
    return None if count.value else "no GPU"


def build_with_hooks(
    sources=tuple(SOURCES), *flags: str, runtime: str = RACES, shared: bool = True
) -> pathlib.Path:
    """Compiles kernels with a call before every memory access.

    Args:
        sources: The core's, or others.
        *flags: Compiler flags, placed first.
        runtime: Receives the calls: the race detector, or `TRAFFIC`.
        shared: Build a library instead of a program.
    """
    from tests.compiling import Compiler

    compiler = Compiler(["-DREDSYNC_GPU_RACES"])
    plain = [flag for flag in EMULATE if flag != "-shared"]
    objects = [compiler.make(*plain, "-c", source) for source in (FIBERS, runtime)]
    # The compiler's instrumentation, without the library for which it is meant.
    hooks = ["-fsanitize=thread", "-nodefaultlibs"]
    libraries = ["-x", "none", "-lstdc++", "-lm", "-ldl", "-lgcc_s", "-lc"]
    kind = EMULATE if shared else plain
    return compiler.make(*flags, *kind, *hooks, *sources, *libraries, objects=objects)


def _nvcc(*words: object) -> None:
    command = [nvcc() or "nvcc", *CUDA, *map(str, words)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    if run.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{run.stderr[-4000:]}")


def compile_cuda(target: pathlib.Path, *flags: str) -> pathlib.Path:
    """Compiles the core with nvcc, on all cores."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [pathlib.Path(folder) / f"{pathlib.Path(s).stem}.o" for s in SOURCES]
        each = zip(SOURCES, objects, strict=True)
        list(pool.map(lambda pair: _nvcc(*flags, "-I.", "-c", pair[0], "-o", pair[1]), each))
        _nvcc(*flags, "-shared", *objects, "-o", target)
    return target


def build(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """Compiles the core as a separate library.

    Args:
        kind: "cuda", "emulated", "sanitized", "races" or "traffic".
        folder: For nvcc's output.
    """
    if kind in ("races", "traffic"):
        return build_with_hooks(runtime=RACES if kind == "races" else TRAFFIC)
    if kind != "cuda":
        from tests.compiling import Compiler

        sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        flags = sanitize if kind == "sanitized" else []
        return Compiler([]).make(*EMULATE, *flags, FIBERS, *SOURCES)
    return compile_cuda(folder / "libredsync_gpu_cuda.so", "-arch=native")
