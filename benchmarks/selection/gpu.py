"""The GPU part of `benchmarks/selection/selection.py --device gpu`: the CUDA core on one GPU.

Measured with the device's own events, the median of several runs after a warm-up:

    exact, threshold    accumulate-and-select (threshold: a search every fifth step)
    decode8             adds 8 messages into a dense tensor
    encode, unpack8     for messages with 1-bit values (`CodedTopK`): encodes the message of
                        `exact`; decodes 8 messages for `decode8`
    blocks8, 4, 2       quantizes an array in blocks of 256; with its errors (`BlockQuantized`)
    from_blocks4        adds 2 such messages
    accumulate          the plain pass over the same arrays
    copy                a copy of one array on the device: its memory bandwidth
    cub_sort            CUB's radix sort of magnitudes and positions (no accumulate pass)
    torch_topk          torch.topk of the magnitudes, if PyTorch with CUDA is installed (no pass)

`fraction_of_copy` is the speed in bytes that must be moved, relative to `copy`: for
accumulate-and-select every input is read and every output is written once. nvcc compiles the CUDA
core for the installed GPU; TensorFlow is not used.
"""

from __future__ import annotations

import ctypes
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np

from tests.gpu import block_calls as blocks
from tests.gpu import device as d
from tests.gpu import topk_calls as topk

BLOCK = 256
WARM_UP, RUNS = 3, 15
SEARCH_INTERVAL = 5
RANKS = 8  # of decode8


class Clock:
    """Milliseconds between two events of the GPU, or of the CPU for the emulator."""

    def __init__(self, device):
        self._device, self._runtime = device, getattr(device, "runtime", None)
        if self._runtime:
            self._events = [ctypes.c_void_p(), ctypes.c_void_p()]
            for event in self._events:
                self._runtime.cudaEventCreate(ctypes.byref(event))

    def time(self, run) -> float:
        """Times one run."""
        if self._runtime is None:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        self._runtime.cudaEventRecord(self._events[0], None)
        run()
        self._runtime.cudaEventRecord(self._events[1], None)
        self._device.synchronize()
        ms = ctypes.c_float()
        self._runtime.cudaEventElapsedTime(ctypes.byref(ms), *self._events)
        return ms.value

    def median(self, run) -> float:
        """Median time of several runs."""
        for _ in range(WARM_UP):
            run()
        return statistics.median(self.time(run) for _ in range(RUNS))


class Arrays:
    """One cell's tensors on the device, and its ops."""

    def __init__(self, device, g: np.ndarray, density: float, momentum: float, baseline):
        self.device, self.n, self.momentum, self.baseline = device, g.size, momentum, baseline
        self.k, self._step = max(1, round(density * g.size)), 0
        rng = np.random.default_rng(1)
        # The residual resembles that after a few steps: gradients in another order.
        self.g, self.v = device.array(g), device.array(rng.permutation(g))
        self.u = device.array(rng.permutation(g)) if momentum else None
        self.new_v, self.new_u = device.array(g), device.array(g) if momentum else None
        self.scalars = {
            "scale": device.array(np.float32([1])),
            "side": device.array(np.int32([1])),
            "ratios": device.array(np.float32([-1])),
            "new_ratios": device.array(np.float32([-1])),
        }
        self.search = [device.array(np.array([s])) for s in (False, True)]
        self.bytes_of_pass = 4 * self.n * (5 if momentum else 3)

    def _pointer(self, array):
        return None if array is None else self.device.pointer(array)

    def select(self, selector: str):
        """A function that accumulates and selects."""
        buffers = (self.g, self.v, self.u, self.new_v, self.new_u)
        tensor = d.Tensor(
            self.n, self.k, d.SELECTORS[selector], 0, *map(self._pointer, buffers)
        )  # fmt: skip
        call = d.Select(ctypes.pointer(tensor), 1, int(self.momentum != 0), 1, self.momentum)
        library = self.device.library
        words = library.redsync_gpu_message_words(ctypes.byref(call))
        message = self.device.array(np.zeros(words, np.int32))
        call.message = self._pointer(message)
        for name, value in self.scalars.items():
            setattr(call, name, self._pointer(value))
        size = library.redsync_gpu_select_scratch_bytes(ctypes.byref(call))
        scratch = self.device.array(np.zeros(size, np.uint8))

        def run(_keep=(message, scratch, tensor)):
            call.search = self._pointer(self.search[self._step % SEARCH_INTERVAL == 0])
            call.ratios, call.new_ratios = call.new_ratios, call.ratios
            self._step += 1
            call.seed = self._step
            status = library.redsync_gpu_select(
                ctypes.byref(call), d.Pointer(self._pointer(scratch)), d.Int64(size), None
            )
            assert status == d.OK, library.redsync_gpu_last_error()

        run.message = message
        return run

    def decode(self):
        """A function that adds messages with random positions."""
        rng, k = np.random.default_rng(2), self.k
        rows = np.ones([RANKS, 2 + 2 * k], np.int32)
        rows[:, 1] = k
        rows[:, 2 : 2 + k] = np.sort([rng.choice(self.n, k, replace=False) for _ in rows], axis=1)
        messages, total = self.device.array(rows), self.device.array(np.zeros(self.n, np.float32))
        part = d.Part(1, k, self.n, 0, self._pointer(total))
        call = d.Decode(self._pointer(messages), *rows.shape, ctypes.pointer(part), 1)
        record = self.device.array(np.zeros(ctypes.sizeof(d.Record), np.uint8))

        def run(_keep=(messages, total, part)):
            pointer = d.Pointer(self._pointer(record))
            assert (
                self.device.library.redsync_gpu_sum_messages(ctypes.byref(call), pointer, None) == 0
            )

        return run

    def _called(self, name: str, call, *, record: bool, keep):
        """A function that calls `redsync_gpu_<name>`, with scratch memory if it needs any."""
        library = self.device.library
        function = getattr(library, f"redsync_gpu_{name}")
        place = self.device.array(np.zeros(ctypes.sizeof(d.Record), np.uint8))
        arguments = [d.Pointer(self._pointer(place))] if record else []
        scratch = None
        if find := getattr(library, f"redsync_gpu_{name}_scratch_bytes", None):
            size = find(ctypes.byref(call))
            scratch = self.device.array(np.zeros(size, np.uint8))
            arguments += [d.Pointer(self._pointer(scratch)), d.Int64(size)]

        def run(_keep=(keep, place, scratch)):
            status = function(ctypes.byref(call), *arguments, None)
            assert status == d.OK, library.redsync_gpu_last_error()

        return run

    def coded(self):
        """Functions that encode one message and decode several, with 1-bit values."""
        select = self.select("exact")
        select()
        form = topk.make_format([self.n], [self.k], 1, [self._pointer(self.new_v)])
        words, plain_words = (
            getattr(self.device.library, f"redsync_gpu_{kind}_words")(ctypes.byref(form))
            for kind in ("topk", "plain")
        )
        message = self.device.array(np.zeros(words, np.int32))
        call = topk.EncodeTopK(form, self._pointer(select.message), self._pointer(message))
        encode = self._called("encode_topk", call, record=False, keep=(select, message))
        encode()
        received = self.device.array(np.tile(self.device.get(message), RANKS))
        plain = self.device.array(np.zeros(RANKS * plain_words, np.int32))
        pointers = [self._pointer(received), RANKS, words, self._pointer(plain)]
        call = topk.DecodeTopK(form, *pointers)
        unpack = self._called("decode_topk", call, record=True, keep=(received, plain))
        return {"encode": encode, f"unpack{RANKS}": unpack}

    def blocks(self):
        """Functions that quantize in blocks, and that add the messages of two workers."""
        found = {}
        for bits in (2, 8, 4):  # the last message is added below
            words = blocks.block_words(self.n, bits=bits, block=BLOCK)
            message = self.device.array(np.zeros(words, np.int32))
            pointers = [self._pointer(x) for x in (self.v, message, self.new_v)]
            call = blocks.Quantize(bits, BLOCK, 1, self.n, *pointers)
            run = self._called("block_quantize", call, record=False, keep=message)
            found[f"blocks{bits}"] = run
        run()
        messages = self.device.array(np.tile(self.device.get(message), 2))
        pointers = [self._pointer(messages), self._pointer(self.new_v)]
        call = blocks.Dequantize(4, BLOCK, 2, self.n, True, *pointers)
        return found | {
            "from_blocks4": self._called("block_dequantize", call, record=False, keep=messages)
        }

    def accumulate(self):
        """A function that only accumulates."""
        pointers = [d.Pointer(self._pointer(x)) for x in (self.g, self.v, self.u)]
        outputs = [d.Pointer(self._pointer(x)) for x in (self.new_v, self.new_u)]
        factor = ctypes.c_float(self.momentum)
        return lambda: self.baseline.benchmark_accumulate(
            *pointers, *outputs, factor, d.Int64(self.n)
        )

    def copy(self):
        """A function that copies an array."""
        to, source = (d.Pointer(self._pointer(x)) for x in (self.new_v, self.g))
        size = d.Int64(4 * self.n)
        return lambda: self.device.library.redsync_gpu_copy(to, source, size, None)

    def sort(self):
        """A function that sorts all magnitudes."""
        size = self.baseline.benchmark_sort_bytes(d.Int64(self.n))
        work = self.device.array(np.zeros(4 * self.n, np.uint32))
        scratch = self.device.array(np.zeros(size, np.uint8))
        pointers = [d.Pointer(self._pointer(x)) for x in (self.v, work, scratch)]

        def run(_keep=(work, scratch)):
            assert self.baseline.benchmark_sort(*pointers, d.Int64(size), d.Int64(self.n)) == 0

        return run

    def torch_topk(self):
        """A function that calls torch.topk, or None without PyTorch on a GPU."""
        try:
            import torch
        except ImportError:
            return None
        if not torch.cuda.is_available():
            return None
        x = torch.from_numpy(self.device.get(self.v)).cuda()

        def run():
            torch.topk(x.abs(), self.k, sorted=False)

        return run

    def functions(self) -> dict:
        """All ops that this machine can measure."""
        ops = {
            "exact": self.select("exact"),
            "threshold": self.select("threshold"),
            "decode8": self.decode(),
            **self.coded(),
            **self.blocks(),
            "copy": self.copy(),
        }
        if self.baseline is not None:
            ops |= {"accumulate": self.accumulate(), "cub_sort": self.sort()}
        topk = self.torch_topk()
        return ops if topk is None else ops | {"torch_topk": topk}


def _rows(arrays: Arrays, clock: Clock, cell: dict) -> list[dict]:
    ms = {op: clock.median(run) for op, run in arrays.functions().items()}
    copied = 8 * arrays.n / ms["copy"]  # bytes per ms, read and written
    moved = {"exact", "threshold", "accumulate"}
    return [
        {
            **cell,
            "op": op,
            "ms": value,
            "ratio_to_accumulate": value / ms["accumulate"] if "accumulate" in ms else None,
            "fraction_of_copy": arrays.bytes_of_pass / value / copied if op in moved else None,
            "runs": RUNS,
        }
        for op, value in ms.items()
    ]


def _build_baseline(target: pathlib.Path):
    source = d.ROOT / "benchmarks" / "selection" / "gpu.cu"
    command = [d.nvcc(), "-std=c++17", "-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(target)], check=True, timeout=280)
    library = ctypes.CDLL(str(target))
    library.benchmark_sort_bytes.restype = d.Int64
    return library


def measure(sizes, densities, inputs, momenta, *, device=None, make=None) -> list[dict]:
    """Measures every cell and prints a line for each.

    Args:
        sizes: numbers of elements, multiples of 4.
        densities: fractions of the elements to select.
        inputs: names known to `benchmarks.selection.inputs.make`.
        momenta: factors; 0 means none.
        device: a device of `tests.gpu.device`; None compiles the core for the first GPU.
        make: makes the input from its name and size; None is `inputs.make`.

    Returns:
        Rows with op, n, density, input, momentum, ms, ratio_to_accumulate, fraction_of_copy, runs.

    Raises:
        SystemExit: if there is no GPU or no CUDA compiler; the text names it.
    """
    if make is None:
        from benchmarks.selection.inputs import make
    with tempfile.TemporaryDirectory() as folder:
        baseline = None
        if device is None:
            problem = d.cuda_problem()
            if problem:
                raise SystemExit(f"`--device gpu` cannot be measured here: {problem}.")
            device = d.Cuda(d.build("cuda", pathlib.Path(folder)))
            baseline = _build_baseline(pathlib.Path(folder) / "libbaseline.so")
        clock, rows = Clock(device), []
        cells = [(n, i, p, m) for n in sizes for i in inputs for p in densities for m in momenta]
        for n, kind, density, momentum in cells:
            cell = {"n": n, "density": density, "input": kind, "momentum": momentum}
            found = _rows(Arrays(device, make(kind, n), density, momentum, baseline), clock, cell)
            times = "  ".join(f"{row['op']} {row['ms']:.4g}" for row in found)
            print(f"{n:10} {kind:10}{density:8g}{momentum:5g}  ms: {times}", flush=True)
            rows += found
    return rows
