"""Loads an op library by its path and compares its ops with the pure-TensorFlow ones.

python tests/kernels/smoke.py build/bazel-bin/custom_ops/_redsync_ops.so
"""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tf_redsync import ops  # noqa: E402
from tf_redsync.ops import native  # noqa: E402


def results(selector: str) -> list[np.ndarray]:
    """Returns selection and decoding outputs of the active backend."""
    rng = np.random.default_rng(0)
    grad, residual, velocity = (
        tf.constant(rng.standard_normal((100, 77)), tf.float32) for _ in range(3)
    )
    k, form = tf.constant([50]), {"selectors": [selector], "quantized": [False]}
    selection = ops.accumulate_and_select(
        [grad], [residual], [velocity], k, tf.constant([-1.0]), momentum=0.9, **form
    )
    totals = ops.decode(tf.stack([selection.message] * 3), selection.layout, [grad])
    return [t.numpy() for t in tf.nest.flatten([selection, totals])]


def main(library: str) -> int:
    """Returns the exit status: 0 if all bits are equal."""
    path = pathlib.Path(library).resolve()
    native.check(path)
    loaded = tf.load_op_library(str(path))
    native.load = lambda: loaded
    for selector in ("exact", "trimmed", "threshold"):
        ops.set_backend("tensorflow")
        expected = results(selector)
        ops.set_backend("native")
        for actual, reference in zip(results(selector), expected, strict=True):
            if actual.tobytes() != reference.tobytes():
                print(f"{path}: {selector} differs from the pure-TensorFlow ops")
                return 1
    print(f"{path}: loads, and its ops agree with the pure-TensorFlow ones")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
