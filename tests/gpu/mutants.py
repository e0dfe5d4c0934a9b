"""Kernels with one synchronization removed: the race detector must detect each mutant.

python -m tests.gpu.mutants [FILE:LINE ...]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from tests.gpu import device as d

SYNCHRONIZATION = re.compile(r"__(syncthreads|syncwarp|threadfence)\(\);")
# Tests that cover each source, the quick ones first; headers are in all.
TESTS = {
    "accumulate": "select", "cut_search": "select", "digits": "select", "merge_select": "merge",
    "compaction": "select", "select": "select", "select_candidates": "select",
    "selection_source": "select",
    "descend": "decode", "runs": "decode", "sum_messages": "decode",
    "dequantize": "quantize", "quantized_format": "quantize",
    "bloom_build": "bloom", "bloom_query": "bloom", "golomb": "golomb",
    "groups": "select", "bits": "bits",
    "bitmaps": "bits", "rice": "bits", "encode_topk": "topk", "decode_topk": "topk",
    "topk_plan": "topk", "block_quantize": "block_quantize",
}  # fmt: skip
ALL = (
    "chunks",
    "bits",
    "checksum",
    "bloom",
    "golomb",
    "merge",
    "topk",
    "decode",
    "quantize",
    "block_quantize",
    "select",
)
FOUND = "emulator: "
TIMEOUT = 800  # seconds, for the tests of one source


@dataclasses.dataclass(frozen=True, order=True)
class Mutant:
    """A source line with one synchronization to remove."""

    file: str
    line: int
    text: str

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.file}:{self.line}"

    def write(self, folder: pathlib.Path) -> None:
        """Writes a copy of the core without it to a folder."""
        shutil.copytree(d.ROOT / "custom_ops" / "core", folder / "custom_ops" / "core")
        path = folder / "custom_ops" / "core" / "gpu" / self.file
        lines = path.read_text().splitlines(keepends=True)
        lines[self.line - 1] = SYNCHRONIZATION.sub(";", lines[self.line - 1], count=1)
        path.write_text("".join(lines))


def mutants() -> list[Mutant]:
    """Returns all mutants."""
    detect = []
    for path in sorted((d.ROOT / "custom_ops" / "core" / "gpu").iterdir()):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if SYNCHRONIZATION.search(line):
                detect.append(Mutant(path.name, number, line.strip()))
    return detect


def run(built: pathlib.Path, tests: str) -> str:
    """Runs tests with a library; returns the detector's message, or the end of a failed output."""
    env = {
        **os.environ,
        "PYTHONPATH": str(d.ROOT),
        "REDSYNC_GPU_LIBRARY": str(built),
        "REDSYNC_GPU_LIBRARY_KIND": "emulated",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    words = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
    command = [sys.executable, "-m", "pytest", *words, f"tests/gpu/test_{tests}.py"]
    done = subprocess.run(
        command, cwd=d.ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    lines = (done.stdout + done.stderr).splitlines()
    start = next((i for i, line in enumerate(lines) if FOUND in line), None)
    if start is not None:
        return "\n".join([lines[start][lines[start].index(FOUND) :], *lines[start + 1 : start + 3]])
    return "" if done.returncode == 0 else "\n".join(lines[-5:])


def detect(mutant: Mutant) -> str:
    """Returns how a mutant was detected; "" if it was not."""
    with tempfile.TemporaryDirectory() as folder:
        mutant.write(pathlib.Path(folder))
        sources = [f"{folder}/{source}" for source in d.SOURCES]
        built = d.build_with_hooks(sources, f"-I{folder}", "-Wno-empty-body")
        stem = pathlib.Path(mutant.file).stem
        for tests in [TESTS[stem]] if stem in TESTS else [t for t in ALL if stem in (t, *SHARED)]:
            message = run(built, tests)
            if message:
                return message
    return ""


SHARED = ("block", "vector_access", "batch", "merge", "chunks", "checksum", "quantize")


def main(names: list[str]) -> None:
    """Runs mutants, and prints a line for each."""
    wanted = [m for m in mutants() if not names or m.name in names]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for mutant, message in zip(wanted, pool.map(detect, wanted), strict=True):
            how = message.splitlines()[0] if message else "NOT FOUND"
            print(f"{mutant.name:24}{mutant.text[:40]:42}{how}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
