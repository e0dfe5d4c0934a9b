"""The C++ core alone: brute force, sanitizers, and equal bits on all instruction sets."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = "-O1 -g -std=c++17 -ffp-contract=off -Wall -Wextra -Werror -Wno-psabi -pthread".split()
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compile_cpp(folder: pathlib.Path, arguments: list[str]) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler {compiler!r}")
    command = [compiler, *FLAGS, f"-I{ROOT}", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compiles a test program with options; the core only once for all programs with them."""
    cores = {}

    def program(name: str, options: list[str]) -> pathlib.Path:
        key = tuple(options)
        if key not in cores:
            cores[key] = tmp_path_factory.mktemp("core")
            sources = map(str, ROOT.glob("custom_ops/core/cpu/*.cc"))
            compile_cpp(cores[key], [*options, "-c", *sources])
        folder = cores[key]
        objects = map(str, folder.glob("*.o"))
        source = str(ROOT / "tests" / "kernels" / f"{name}.cc")
        compile_cpp(folder, [*options, source, *objects, "-o", name])
        return folder / name

    return program


@pytest.fixture(scope="module", params=["core_test", "codecs_test"])
def program(build, request):
    return build(request.param, SANITIZE)


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


@pytest.mark.parametrize("messages", [2000, pytest.param(10**6, marks=pytest.mark.deep)])
def test_mutated_messages(build, messages):
    """Every decoder, with sanitizers: nothing is read or written out of bounds, and none hangs."""
    program = build("fuzz_decoders", SANITIZE)
    done = subprocess.run([program, str(messages)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert len(done.stdout.splitlines()) == 8, done.stdout


@pytest.mark.deep  # a minute, and gigabytes
@pytest.mark.parametrize("name", ["large_tensors", "large_codecs"])
def test_more_than_two_to_the_31_elements(build, name):
    """Sizes have 64 bits, and positions 32 without a sign."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 10 * 2**30:
        pytest.skip(f"takes 9 GiB of memory; {free / 2**30:.1f} GiB are free")
    program = build(name, ["-O3"])
    done = subprocess.run([program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
