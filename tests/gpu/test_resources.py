"""Kernel resources, known without a GPU: registers, spills, instructions, launches, bytes."""

import concurrent.futures
import ctypes
import importlib.metadata
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.gpu import device as d
from tests.gpu.calls import select
from tests.gpu.inputs import make_inputs

ARCHITECTURE = "sm_90"
REGISTERS = 80  # registers per thread, at most: three blocks of 256 threads per multiprocessor
# At most 64: blocks of 1024 threads, or four blocks of 256.
FEW = {"Predict", "SortRuns", "AccumulateILi0E"}
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for.*?(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


# Maximum instructions of a kernel: 5 to 10 % above those of nvcc 13.0. Names are parts of
# mangled ones; the kernel with `ILi1E` has momentum.
INSTRUCTIONS = {
    "accumulate": {"AccumulateILi0E": 2900, "AccumulateILi1E": 3150, "AccumulateILi2E": 3170},
    "select_candidates": {"SelectCandidates": 6620},
    "sum_messages": {"AddRanks": 1330},
}


def nvdisasm() -> str | None:
    """Returns the disassembler of CUDA's toolkit, or of a separate package."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return shutil.which("nvdisasm")
    return next((str(f.locate()) for f in files if f.name == "nvdisasm"), None)


def compiled(source, folder) -> tuple[pathlib.Path, str]:
    """Returns the machine code of a source's kernels, and the output of ptxas."""
    flags = [f for f in d.FLAGS if not f.startswith("-Xcompiler")]
    target = folder / f"{pathlib.Path(source).stem}.cubin"
    command = [d.nvcc(), *flags, "-I.", "-cubin", f"-arch={ARCHITECTURE}", "-Xptxas=-v", source]
    run = subprocess.run(
        [*command, "-o", str(target)], cwd=d.ROOT, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return target, run.stdout + run.stderr


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """Machine code by stem of the source, see `compiled`."""
    if d.nvcc() is None:
        pytest.skip("there is no nvcc")
    folder = tmp_path_factory.mktemp("cubins")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda source: compiled(source, folder), d.SOURCES)
        return {target.stem: (target, output) for target, output in results}


def test_no_register_spills(cubins):
    needs = {}
    for _, output in cubins.values():
        for m in KERNEL.finditer(output):
            needs[m["name"]] = (int(m["stores"]) + int(m["loads"]), int(m["registers"]))
    sources = "".join((d.ROOT / s).read_text() for s in d.SOURCES)
    assert len(needs) >= sources.count("__global__ ") > 30, "a template has several kernels"
    assert {name: need for name, need in needs.items() if need[0] > 0} == {}
    for name, (_, registers) in needs.items():
        most = 64 if any(part in name for part in FEW) else REGISTERS
        assert registers <= most, name


@pytest.mark.parametrize(
    ("selector", "launches"), [("exact", 5), ("trimmed", 5), ("threshold", 5), ("fixed", 4)]
)
def test_launches_of_a_batch(device, selector, launches):
    """It does not depend on the number of tensors, up to 24. A launch costs microseconds."""
    count = getattr(device.library, "emulator_launches", None)
    if count is None:
        pytest.skip("only the emulator counts launches")
    for tensors in (1, 24):
        inputs = make_inputs("normal", (40_000,) * tensors, 1)
        before = count()
        select(
            device, inputs[0], inputs[1], [], [40] * tensors, np.full(tensors, 1.0, np.float32),
            selectors=[selector] * tensors, quantized=[False] * tensors,
        )  # fmt: skip
        assert count() - before == launches


@pytest.mark.skipif(nvdisasm() is None, reason="there is no nvdisasm: nvidia-cuda-nvdisasm has it")
@pytest.mark.parametrize("stem", INSTRUCTIONS)
def test_instructions(stem, cubins):
    """Compiled kernels do not grow unnoticed, and vector loads remain vectors."""
    command = [nvdisasm(), "-c", str(cubins[stem][0])]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = {}
    for section in re.split(r"(?m)^\.text\.", text)[1:]:
        code = re.findall(r"(?m)^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", section)
        found[section.partition(":")[0]] = [line for line in code if "NOP" not in line]
    for part, most in INSTRUCTIONS[stem].items():
        (code,) = [lines for name, lines in found.items() if part in name]
        assert 0.7 * most < len(code) <= most, part
        if stem == "accumulate":
            arrays = 2 if "ILi0E" in part else 3
            assert sum("LDG.E.128" in line for line in code) >= 4 * arrays, (
                "four vector loads in flight"
            )


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """An emulator that counts the bytes of memory accesses."""
    emulated = d.Emulated(d.build("traffic", tmp_path_factory.mktemp("traffic")))
    emulated.library.emulator_bytes.restype = ctypes.c_int64
    return emulated


@pytest.mark.parametrize("gradient", [np.float32, np.uint16], ids=["float32", "bfloat16"])
def test_bytes_of_a_selection(counting, gradient):
    """At most 10 % above a plain pass, which reads three arrays and writes two."""
    counter = counting.library.emulator_bytes
    n, rng = 2**24, np.random.default_rng(0)
    arrays = [rng.standard_normal(n, np.float32) for _ in range(3)]
    if gradient is np.uint16:
        arrays[0] = (arrays[0].view(np.uint32) >> 16).astype(np.uint16)
    before = [counter(which) for which in (0, 1)]
    select(
        counting, *([x] for x in arrays), [n // 1000], np.float32([-1]), selectors=["exact"],
        quantized=[False], momentum=0.9,
    )  # fmt: skip
    read, written = (counter(which) - b for which, b in enumerate(before))
    least = (gradient().itemsize + 8) * n
    assert least <= read and 8 * n <= written
    assert read + written <= 1.1 * (least + 8 * n), (read / n, written / n)
