"""One worker of PyTorch's DistributedDataParallel over Gloo, on CPUs.

`none`      forward and backward pass under `no_sync()`, and the update: nothing is sent
`dense`     plain DistributedDataParallel
`fp16`      with `fp16_compress_hook`
`powersgd`  with `powerSGD_hook`, rank 4

Started by `python -m benchmarks.peers`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import numpy as np

from benchmarks.models import LEARNING_RATE, VGG16_FILTERS, initial_weights
from benchmarks.peers import common

METHODS = ("none", "dense", "fp16", "powersgd")
RANK = 4
# The all-reduce stays unchanged until this step: PyTorch requires at least 2 with error feedback
# and warm start. The first step builds DDP's buckets.
START_POWER_SGD = 2
# PyTorch's PowerSGD hook deadlocks on Gloo with several buckets: each one waits for its own
# collectives in an order that may differ between workers.
ONE_BUCKET_MB = 1000


def peer() -> common.Peer:
    """Returns the library's description."""
    return common.Peer(
        name="pytorch",
        module="benchmarks.peers.pytorch_ddp",
        methods=METHODS,
        installs=(("numpy>=2,<3", "torch==2.13.0"),),
    )


def make_model(name: str) -> Any:
    """Returns the model of `benchmarks/models.py`, with images as [batch, channels, y, x]."""
    from torch import nn

    if name == "resnet9":
        return resnet9(classes=10)
    layers: list[Any] = []
    if name == "mlp":
        widths = [784, *[2048] * 6]
    else:
        channels = 3
        for filters, repeats in VGG16_FILTERS:
            for _ in range(repeats):
                layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
                channels = filters
            layers.append(nn.MaxPool2d(2))
        layers.append(nn.Flatten())  # of one pixel: the order of its axes does not matter
        widths = [channels, 512, 512]
    for inputs, outputs in zip(widths, widths[1:]):  # noqa: B905 pairs
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def resnet9(classes: int, width: int = 32) -> Any:
    """Returns the network of `benchmarks/accuracy/networks.py` with its initialization."""
    import torch
    from torch import nn

    def convolved(inputs: int, filters: int) -> list[Any]:
        convolution = nn.Conv2d(inputs, filters, 3, padding=1, bias=False)
        # He's of Keras: a normal distribution truncated at two deviations, whose deviation is 0.88.
        std = (2 / (9 * inputs)) ** 0.5 / 0.87962566103423978
        nn.init.trunc_normal_(convolution.weight, std=std, a=-2 * std, b=2 * std)
        return [convolution, nn.BatchNorm2d(filters, eps=1e-3), nn.ReLU()]

    class Residual(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return x + super().forward(x)

    class Scaled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 0.125 * super().forward(torch.amax(x, (2, 3)))

    parts, filters = convolved(3, width), width
    for factor, residual in ((2, True), (4, False), (8, True)):
        parts += [*convolved(filters, factor * width), nn.MaxPool2d(2)]
        filters = factor * width
        if residual:
            parts.append(Residual(*convolved(filters, filters), *convolved(filters, filters)))
    last = Scaled(filters, classes, bias=False)
    nn.init.xavier_uniform_(last.weight)
    return nn.Sequential(*parts, last)


def set_weights(model: Any, seed: int) -> None:
    """Sets the weights of the Keras peers, transposed to PyTorch's order of axes."""
    import torch

    # To Keras: [out, in] -> [in, out], [out, in, y, x] -> [y, x, in, out]; and back.
    there, back = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}, {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}
    parameters = list(model.parameters())
    shapes = [[p.shape[axis] for axis in there[p.ndim]] for p in parameters]
    norms = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)}
    ones = [id(p) in norms for p in parameters]
    with torch.no_grad():
        for parameter, weight in zip(parameters, initial_weights(shapes, seed, ones)):  # noqa: B905
            parameter.copy_(torch.from_numpy(weight.transpose(back[weight.ndim]).copy()))


def distributed(model: Any, method: str) -> tuple[Any, dict[str, Any], Any]:
    """Returns the model in DistributedDataParallel, the method's settings, and its hook's state.

    The state counts sent bytes; only PowerSGD has one.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
    from torch.nn.parallel import DistributedDataParallel

    if method != "powersgd":
        ddp = DistributedDataParallel(model)
        if method == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return ddp, {}, None
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = power_sgd.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=START_POWER_SGD
    )
    ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
    settings = {
        "matrix_approximation_rank": RANK,
        "start_powerSGD_iter": START_POWER_SGD,
        "bucket_cap_mb": ONE_BUCKET_MB,
    }
    return ddp, settings, state


def as_input(array: np.ndarray) -> Any:
    """Returns the tensor of inputs or labels; images become channels first."""
    import torch

    if array.ndim == 4:
        array = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "i" else array)


def build(args: argparse.Namespace, where: common.Cluster) -> common.Session:
    """Joins the process group and returns the model, ready to train."""
    os.environ["GLOO_SOCKET_IFNAME"] = where.interface
    import torch
    import torch.distributed as dist

    torch.set_num_threads(common.threads())
    address = f"tcp://{where.host}:{where.port}"
    dist.init_process_group("gloo", address, rank=where.rank, world_size=where.size)
    model = make_model(args.model)
    set_weights(model, args.seed)
    ddp, settings, _ = distributed(model, args.method)
    optimizer = torch.optim.SGD(ddp.parameters(), LEARNING_RATE)
    loss_of = torch.nn.CrossEntropyLoss()
    alone = ddp.no_sync if args.method == "none" else contextlib.nullcontext

    def step(inputs: Any, labels: Any) -> None:
        optimizer.zero_grad()
        with alone():
            loss = loss_of(ddp(inputs), labels)
            loss.backward()
        optimizer.step()
        loss.item()

    def logits(inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(as_input(inputs)).numpy()

    return common.Session(
        tensor=as_input,
        step=step,
        barrier=dist.barrier,
        logits=logits,
        params=sum(p.numel() for p in model.parameters()),
        versions={"torch": torch.__version__},
        settings=settings,
    )


if __name__ == "__main__":
    common.main(METHODS, build)
