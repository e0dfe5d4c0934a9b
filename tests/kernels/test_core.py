"""The C++ core alone: brute force, sanitizers, and equal bits on all instruction sets."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = "-O1 -g -std=c++17 -ffp-contract=off -Wall -Wextra -Werror -Wno-psabi -pthread".split()
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def build(name: str, folder: pathlib.Path, options: list[str]) -> pathlib.Path:
    """A test program, compiled."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler {compiler!r}")
    target = folder / name
    sources = [f"tests/kernels/{name}.cc", *map(str, ROOT.glob("custom_ops/core/cpu/*.cc"))]
    command = [compiler, *FLAGS, *options, "-I.", *sources, "-o", str(target)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    return target


@pytest.fixture(scope="module", params=["core_test", "codecs_test"])
def program(tmp_path_factory, request):
    return build(request.param, tmp_path_factory.mktemp("core"), SANITIZE)


def run(program, simd: str, threads: int) -> tuple[str, str]:
    """Instruction set used, and digest of all results."""
    env = {**os.environ, "TF_REDSYNC_SIMD": simd}
    done = subprocess.run(
        [program, str(threads)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    used, digest = done.stdout.split()
    return used, digest


def test_all_versions_give_the_same_bits(program):
    results = [run(program, simd, threads) for simd, threads in
               (("plain", 1), ("avx2", 2), ("avx512", 3))]  # fmt: skip
    assert results[0][0] == "plain"
    assert len({digest for _, digest in results}) == 1, results


@pytest.mark.parametrize("name", ["large_tensors", "large_codecs"])
def test_more_than_two_to_the_31_elements(tmp_path, name):
    """Sizes have 64 bits, and positions 32 without a sign."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 10 * 2**30:
        pytest.skip(f"takes 9 GiB of memory; {free / 2**30:.1f} GiB are free")
    program = build(name, tmp_path, ["-O3"])
    done = subprocess.run([program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
