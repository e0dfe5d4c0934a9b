"""The native op's result does not depend on TensorFlow's number of threads."""

import hashlib
import os
import pathlib
import subprocess
import sys

import tensorflow as tf

from tests.kernels.common import decode, make_inputs, needs_native, select

ROOT = pathlib.Path(__file__).resolve().parents[2]


def digest() -> str:
    """Digest of selections from tensors of many blocks, and of their decoding."""
    sizes, k = (300_001, 131_072), [300, 40_000]
    state = hashlib.sha256()
    for kind in ("normal", "ties", "clustered"):
        inputs = make_inputs(kind, sizes)
        for selector in ("exact", "threshold"):
            options = {"selectors": [selector] * 2, "quantized": [False, True]}
            result = select("native", inputs, k, [-1, -1], momentum=(0.9, False), **options)
            totals = decode("native", result.message[None], k, inputs[0], **options)
            for array in tf.nest.flatten([result, totals]):
                state.update(array.tobytes())
    return state.hexdigest()


@needs_native
def test_one_and_two_threads():
    """This process has as many as its environment says, one by default; another one has others."""
    here = os.environ["TF_NUM_INTRAOP_THREADS"]
    threads = "2" if here == "1" else "1"
    env = {**os.environ, "TF_NUM_INTRAOP_THREADS": threads, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_threads"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split()[-1] == digest()


if __name__ == "__main__":
    print(digest())
