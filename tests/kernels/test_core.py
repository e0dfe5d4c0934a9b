"""The C++ core alone: brute force, sanitizers, and equal bits on all instruction sets."""

import os
import pathlib
import subprocess

import pytest

from tests.compiling import Compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Line numbers for the sanitizers; the lowest optimization that does not slow the tests down.
FLAGS = "-Og -g1 -std=c++17 -ffp-contract=off -Wall -Wextra -Werror -Wno-psabi -pthread -I.".split()
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def build(name: str, options: list[str]) -> pathlib.Path:
    """Compiles a test program with options; compiles the core once for all programs with them."""
    compiler = Compiler([*FLAGS, *options])
    core = sorted(ROOT.glob("custom_ops/core/cpu/*.cc"))
    objects = [compiler.make("-c", p.relative_to(ROOT).as_posix()) for p in core]
    return compiler.make(f"tests/kernels/{name}.cc", objects=objects)


@pytest.fixture(scope="module", params=["core_test", "codecs_test"])
def program(request):
    return build(request.param, SANITIZE)


def run(program, simd: str, threads: int, *flags) -> tuple[str, str]:
    """Returns the instruction set and a digest of all results."""
    env = {**os.environ, "TF_REDSYNC_SIMD": simd}
    command = [program, str(threads), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    used, digest = done.stdout.split()
    return used, digest


def test_all_instruction_sets_give_equal_bits(program):
    results = [run(program, "plain", 1)]  # against brute force; the others against it
    results += [run(program, *how, "digest") for how in (("avx2", 2), ("avx512", 3))]
    assert results[0][0] == "plain"
    assert len({digest for _, digest in results}) == 1, results


@pytest.mark.parametrize("messages", [2000, pytest.param(10**6, marks=pytest.mark.deep)])
def test_mutated_messages(messages):
    """Runs every decoder with sanitizers: no out-of-bounds access and no hang."""
    program = build("fuzz_decoders", SANITIZE)
    done = subprocess.run([program, str(messages)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert len(done.stdout.splitlines()) == 9, done.stdout


@pytest.mark.deep  # a minute, and gigabytes
@pytest.mark.parametrize("name", ["large_tensors", "large_codecs"])
def test_more_than_two_to_the_31_elements(name):
    """Sizes have 64 bits, and positions are unsigned 32-bit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 10 * 2**30:
        pytest.skip(f"takes 9 GiB of memory; {free / 2**30:.1f} GiB are free")
    program = build(name, ["-O3"])
    done = subprocess.run([program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
