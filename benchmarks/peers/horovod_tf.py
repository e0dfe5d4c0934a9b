"""One worker of Horovod over Gloo, on CPUs, with TensorFlow and its Keras 2.

`none`   plain TensorFlow: nothing is sent
`dense`  `hvd.DistributedGradientTape`
`fp16`   with `hvd.Compression.fp16`

Started by `python -m benchmarks.peers`. Horovod's own launcher reaches other machines by ssh, so it
is not used: this module sets its variables, and worker 0 serves the rendezvous.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import threading
import time
from typing import Any

from benchmarks.models import LEARNING_RATE, WORKLOADS, set_initial_weights
from benchmarks.peers import common

METHODS = ("none", "dense", "fp16")
RENDEZVOUS_SECONDS = 60
_CLONE_NEWUTS = 0x04000000


def peer() -> common.Peer:
    """Returns the library's description. Horovod 0.28.1 supports TensorFlow up to 2.15."""
    return common.Peer(
        name="horovod",
        module="benchmarks.peers.horovod_tf",
        methods=METHODS,
        installs=(
            # Requirements of its setup.py. `--no-build-isolation` compiles it against the
            # TensorFlow that will load it. setup.py needs `packaging` and `cmake`, and
            # pkg_resources of setuptools before 82.
            ("tensorflow==2.15.1", "numpy<2", "setuptools<70", "wheel", "packaging", "cmake<4"),
            # A wheel in pip's cache may have been compiled for another TensorFlow.
            ("--no-build-isolation", "--no-cache-dir", "horovod==0.28.1"),
        ),
        environment={
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_CPU_OPERATIONS": "GLOO",
            "MAKEFLAGS": "-j2",
        },
        pythons=("3.11", "3.10"),
        tools={"g++": "a C++ compiler (Debian package g++)", "make": "make (Debian package make)"},
    )


def variables(where: common.Cluster) -> dict[str, str]:
    """Returns the environment variables of Horovod's launcher: one worker per machine."""
    rank, size = str(where.rank), str(where.size)
    return {
        "HOROVOD_HOSTNAME": f"worker{rank}",
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": rank,
        "HOROVOD_CROSS_SIZE": size,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": where.host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(where.port),
        "HOROVOD_GLOO_IFACE": where.interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def name_machine(where: common.Cluster) -> None:
    """Sets the machine's host name to the worker's address, for this process alone.

    Horovod 0.28.1 ignores HOROVOD_GLOO_IFACE in the context of its collectives, which binds to the
    address of the host name. That name is the same in all network namespaces.
    """
    if where.interface == "lo":
        return  # all workers are on this machine, whose name resolves
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUTS) failed")
    socket.sethostname(where.own_host)


def rendezvous(where: common.Cluster) -> None:
    """Serves the rendezvous on worker 0; the others wait for it."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    if where.rank == 0:
        server = RendezvousHTTPServer((where.host, where.port), RendezvousHandler, 0)
        server.init([])  # no plan: workers' keys are cleared one by one
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return
    end = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        try:
            socket.create_connection((where.host, where.port), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def build(args: argparse.Namespace, where: common.Cluster) -> common.Session:
    """Joins the other workers and returns the model, ready to train."""
    name_machine(where)  # before threads start, which would keep the old name
    os.environ.update(variables(where))
    import horovod
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    rendezvous(where)
    hvd.init()
    model = WORKLOADS[args.model].build()
    set_initial_weights(model, args.seed)
    hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer = tf.keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = hvd.Compression.fp16 if args.method == "fp16" else hvd.Compression.none

    @tf.function
    def train(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        if args.method != "none":
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905
        return loss

    return common.Session(
        tensor=tf.constant,
        step=lambda inputs, labels: train(inputs, labels).numpy(),
        barrier=lambda: hvd.allreduce(tf.zeros(()), name="barrier").numpy(),
        logits=lambda inputs: model(inputs).numpy(),
        params=model.count_params(),
        versions={
            "horovod": horovod.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        settings={},
    )


if __name__ == "__main__":
    common.main(METHODS, build)
