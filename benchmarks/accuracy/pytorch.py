"""The standard runs of ResNet-9 in PyTorch: DistributedDataParallel over Gloo, and its hooks.

    python -m benchmarks.accuracy.pytorch --methods fp16 --learning_rate 0.4 --epochs 12 \
        --evaluations 12 --data_dir DATA --json row.json

Network, data, order of the examples, schedule and decoupled weight decay are those of
`standard_runs.py`; every worker is a process. Needs torch, NumPy and Pillow, not TensorFlow; all
workers share a GPU if torch finds one. The methods are those of `benchmarks/peers/pytorch_ddp.py`.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.accuracy.data import Data
from benchmarks.accuracy.report import Report
from benchmarks.accuracy.run_queue import end_with_parent
from benchmarks.accuracy.tasks import TASKS, WARM_UP, Settings, examples, steps_per_epoch
from benchmarks.peers import pytorch_ddp

METHODS = tuple(name for name in pytorch_ddp.METHODS if name != "none")
BITS = {"dense": 32.0, "fp16": 16.0}
TEST_BATCH = 250


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: flags of `benchmarks/convergence.py`."""
    parser = argparse.ArgumentParser(prog="pytorch.py", allow_abbrev=False)
    add = parser.add_argument
    add("--task", choices=["cifar10"], default="cifar10")
    add("--model", choices=["resnet9"], default="resnet9")
    add("--methods", choices=METHODS, required=True)
    add("--workers", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--epochs", type=float, default=12)
    add("--batch", type=int, default=32)
    add("--learning_rate", type=float, required=True)
    add("--weight_decay", type=float, default=0.0)
    add("--schedule", choices=["warm_cosine"], default="warm_cosine")
    add("--augment", action="store_true")
    add("--evaluations", type=int, default=6)
    add("--data_dir", type=Path, required=True)
    add("--threads", type=int, default=1, help="of a worker")
    add("--json", type=Path, required=True)
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace, images: int) -> Settings:
    """The settings of a row, as in `benchmarks/convergence.py`."""
    steps = round(args.epochs * steps_per_epoch(images, args.workers, args.batch))
    return Settings(
        task=args.task, model=args.model, workers=args.workers, real=True, steps=steps,
        batch=args.batch, optimizer="sgd", learning_rate=args.learning_rate,
        momentum=TASKS[args.task].momentum, weight_decay=args.weight_decay,
        schedule=args.schedule, clip_norm=None, augment=args.augment,
        evaluations=args.evaluations,
    )  # fmt: skip


def rate(settings: Settings, step: int) -> float:
    """Returns the learning rate of a step: a linear warm-up, then a cosine to 0."""
    rise = max(1, round(WARM_UP * settings.steps))
    if step < rise:
        return settings.learning_rate * step / rise
    done = (step - rise) / max(1, settings.steps - rise)
    return settings.learning_rate * (1 + math.cos(math.pi * done)) / 2


class Worker:
    """One worker process.

    Args:
        settings: Settings of the row.
        found: The data.
        method: One of `METHODS`.
        seed: Seed of the weights and of the order of the examples.
        rank: Rank of the worker.
    """

    def __init__(self, settings: Settings, found: Data, method: str, seed: int, rank: int):
        self.settings, self.found, self.method, self.rank = settings, found, method, rank
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(seed)
        self.model = pytorch_ddp.make_model(settings.model).to(self.device)
        self.ddp, _, self.state = pytorch_ddp.distributed(self.model, method)
        self.optimizer = torch.optim.SGD(
            self.ddp.parameters(), settings.learning_rate, momentum=settings.momentum
        )
        self.loss_of = torch.nn.CrossEntropyLoss()
        self.rows = settings.rows(len(found.train[1]), seed)
        self.losses: list[Any] = []

    def _tensor(self, array: np.ndarray) -> Any:
        return pytorch_ddp.as_input(array).to(self.device)

    def step(self, number: int) -> None:
        """Runs one step; weight decay is applied before the update, as in Keras."""
        own = self.optimizer.param_groups[0]
        own["lr"] = rate(self.settings, number)
        x, y = map(self._tensor, examples(self.settings, self.found, self.rows, number, self.rank))
        self.optimizer.zero_grad()
        loss = self.loss_of(self.ddp(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_mul_(own["params"], 1 - own["lr"] * self.settings.weight_decay)
        self.optimizer.step()
        self.losses.append(loss.detach())

    def evaluate(self) -> dict[str, float]:
        """Returns `loss` and `metric` on the test set, and `train_loss` since the last time."""
        x, y = self.found.test
        loss = right = 0.0
        self.model.eval()
        with torch.no_grad():
            for i in range(0, len(y), TEST_BATCH):
                labels = self._tensor(y[i : i + TEST_BATCH])
                logits = self.model(self._tensor(self.found.inputs(x[i : i + TEST_BATCH])))
                loss += float(self.loss_of(logits, labels)) * len(labels) / len(y)
                right += float((logits.argmax(-1) == labels).sum()) / len(y)
        self.model.train()
        trained = float(torch.stack(self.losses).mean())
        self.losses = []
        return {"loss": loss, "metric": 100 * right, "train_loss": trained}

    @property
    def bits(self) -> float:
        """Bits of a payload per weight and step."""
        if self.state is None:
            return BITS[self.method]
        compression, *_ = self.state.compression_stats()
        return 32.0 / compression


def train(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """Trains in a worker process; worker 0 writes the row."""
    end_with_parent()  # torch sends SIGINT, which background programs ignore by default
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=args.workers)
    found = TASKS[args.task].load(args.data_dir)
    settings = settings_of(args, len(found.train[1]))
    worker = Worker(settings, found, args.methods, args.seed, rank)
    kept = Report(settings.common(found), args.json)
    row: dict[str, Any] = {
        "method": args.methods, "seed": args.seed, "command": command(args),
        "date": time.strftime("%Y-%m-%d"), "device": _device(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip
    curve: dict[str, list[float]] = {"steps": []}
    begun, processor = time.perf_counter(), time.process_time()
    for number in range(1, settings.steps + 1):
        worker.step(number - 1)
        if number not in settings.evaluated_at or rank:
            continue
        curve["steps"].append(number)
        for name, value in worker.evaluate().items():
            curve.setdefault(name, []).append(value)
        seconds = time.perf_counter() - begun
        print(
            f"{args.methods}, seed {args.seed}: step {number}/{settings.steps}, test accuracy "
            f"{curve['metric'][-1]:.2f}; {1e3 * seconds / number:.0f} ms a step", flush=True,
        )  # fmt: skip
        kept.add({**row, "curve": curve})
    dist.barrier()
    if not rank:
        last = {name: curve[name][-1] for name in ("metric", "loss")}
        used = time.process_time() - processor
        counted = {
            "bits": worker.bits,
            "elements": sum(p.numel() for p in worker.model.parameters()),
            "seconds": time.perf_counter() - begun, "processor_seconds": used * args.workers,
        }  # fmt: skip
        kept.add({**row, **last, **counted, "curve": curve})
    dist.destroy_process_group()


def command(args: argparse.Namespace) -> str:
    """Returns the command line that trains the row."""
    parts = ["python", "-m", "benchmarks.accuracy.pytorch"]
    for name, value in vars(args).items():
        parts += [f"--{name}"] if value is True else [f"--{name}", str(value)] if value else []
    return shlex.join(parts)


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    args = parse(argv)
    TASKS[args.task].load(args.data_dir)  # decodes the images once
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (args, f"{folder}/meeting"), args.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
