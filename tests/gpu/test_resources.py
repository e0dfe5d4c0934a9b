"""What kernels need, known without a GPU: registers, spills, and how many are launched."""

import concurrent.futures
import os
import re
import subprocess

import numpy as np
import pytest

from tests.gpu import device as d
from tests.gpu.calls import select
from tests.gpu.inputs import make_inputs

ARCHITECTURE = "sm_90"
REGISTERS = 80  # of a thread, at most: three blocks of 256 threads a multiprocessor
LONE = {"Predict", "SortRuns"}  # blocks of 1024 threads, so 64 registers
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for.*?(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def kernels(source, folder):
    """By mangled name: bytes spilt, and registers."""
    flags = [f for f in d.FLAGS if not f.startswith("-Xcompiler")]
    target = folder / f"{os.path.basename(source)}.cubin"
    command = [d.nvcc(), *flags, "-I.", "-cubin", f"-arch={ARCHITECTURE}", "-Xptxas=-v", source]
    run = subprocess.run(
        [*command, "-o", str(target)], cwd=d.ROOT, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = KERNEL.finditer(run.stdout + run.stderr)
    return {m["name"]: (int(m["stores"]) + int(m["loads"]), int(m["registers"])) for m in found}


@pytest.mark.skipif(d.nvcc() is None, reason="there is no nvcc")
def test_nothing_is_spilt(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda source: kernels(source, tmp_path), d.SOURCES))
    needs = {name: need for of_source in found for name, need in of_source.items()}
    sources = "".join((d.ROOT / s).read_text() for s in d.SOURCES)
    assert len(needs) >= sources.count("__global__ ") > 30, "templates are several"
    assert {name: need for name, need in needs.items() if need[0] > 0} == {}
    for name, (_, registers) in needs.items():
        most = 64 if any(lone in name for lone in LONE) else REGISTERS
        assert registers <= most, name


@pytest.mark.parametrize(
    ("selector", "launches"), [("exact", 14), ("trimmed", 14), ("threshold", 15), ("fixed", 13)]
)
def test_launches_of_a_batch(device, selector, launches):
    """However many tensors there are, up to 24. One more costs each step a few microseconds."""
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
