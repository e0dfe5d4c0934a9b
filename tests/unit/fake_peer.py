"""A stand-in for a worker of benchmarks/peers: a NumPy linear model without a network.

`none` trains on its own data. `dense` does not train, so the workers agree. `split` trains
although it should agree. `crash` raises on worker 1, and `stuck` never ends.
"""

import os
import time

import numpy as np

from benchmarks.models import initial_weights
from benchmarks.peers import common

METHODS = ("none", "dense", "split", "crash", "stuck")


def build(args, where):
    """Builds the model; see `common.main`."""
    if args.method == "crash" and where.rank == 1:
        raise RuntimeError("no such luck")
    if args.method == "stuck":
        time.sleep(600)
    kernel, bias = initial_weights([(784, 10), (10,)], args.seed)

    def step(inputs, labels):
        if args.method != "dense":
            np.subtract(kernel, 0.01 * inputs.T @ np.eye(10)[labels], out=kernel, casting="unsafe")

    return common.Session(
        tensor=np.asarray,
        step=step,
        barrier=lambda: None,
        logits=lambda inputs: inputs @ kernel + bias,
        params=kernel.size + bias.size,
        versions={"fake": f"1.{where.size}", "threads": str(common.threads())},
        settings={"path": os.environ["PYTHONPATH"]},
    )


if __name__ == "__main__":
    common.main(METHODS, build)
