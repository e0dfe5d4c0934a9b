"""The tasks: data, networks, and the settings of dense training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.accuracy import data, networks, translation
from benchmarks.accuracy.data import Data

if TYPE_CHECKING:
    import keras

    from tf_redsync.exchange.traits import Traits

Network = Callable[[tuple[int, ...], int], "keras.Model"]
SCHEDULES = ("constant", "cosine", "warm_cosine", "steps")
WARM_UP = 0.1  # part of the steps in which the rate of "warm_cosine" rises
OPTIMIZERS = ("sgd", "adam", "adamw", "amsgrad", "adam_amsgrad", "muon")


@dataclasses.dataclass(frozen=True)
class Task:
    """A task and its defaults on the command line.

    Attributes:
        load: Reads the data.
        networks: By name; the first is the default.
        metric: `"accuracy"`, `"perplexity"` or `"BLEU"` on the test set.
        batch: Examples per worker and step.
        epochs: Number of passes over the training set.
        optimizer: One of `OPTIMIZERS`.
        learning_rate: Learning rate of the optimizer.
        momentum: Momentum of SGD, or beta_1 of the others.
        weight_decay: Weight decay of AdamW and SGD.
        clip_norm: Bound on the norm of the gradient; see `Settings`.
    """

    load: Callable[[Path | None], Data]
    networks: dict[str, Network]
    metric: str
    batch: int
    epochs: float
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float | None = None


TASKS = {
    "digits": Task(
        data.digits,
        {"mlp": networks.mlp, "conv": networks.conv},
        "accuracy", batch=32, epochs=25, learning_rate=0.02,
    ),
    "cifar10": Task(
        data.cifar10,
        {"cnn": networks.cnn, "resnet20": networks.resnet20, "vgg": networks.vgg,
         "resnet9": networks.resnet9},
        "accuracy", batch=32, epochs=12, learning_rate=0.05,
    ),
    "charlm": Task(
        data.characters, {"transformer": networks.transformer, "gpt": networks.gpt},
        "perplexity", batch=8, epochs=2, optimizer="adamw", learning_rate=1e-3, weight_decay=0.1,
    ),
    "multi30k": Task(
        translation.multi30k, {"translator": networks.translator},
        "BLEU", batch=32, epochs=12, optimizer="adamw", learning_rate=1e-3, weight_decay=0.01,
    ),
    "wordlm": Task(
        data.words, {"lstm": networks.lstm},
        "perplexity", batch=5, epochs=13, learning_rate=20.0, momentum=0.0, clip_norm=0.25,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all rows of a report share: all but the method and the seed.

    Attributes:
        task: Name of the task.
        model: Name of its network.
        workers: Number of workers.
        real: Whether workers are processes instead of simulated in this one.
        steps: Length of the training.
        batch: Examples per worker and step.
        optimizer: The inner optimizer, one of `OPTIMIZERS`: `"amsgrad"` is `rs.AMSGrad`, that of
            COMP-AMS, `"adam_amsgrad"` Keras's `Adam(amsgrad=True)`, which corrects the bias, and
            `"muon"` is `rs.Muon` with a momentum of 0.95 for matrices.
        learning_rate: Learning rate of the inner optimizer.
        momentum: Momentum of SGD, or beta_1 of the others, unless the method applies momentum.
        weight_decay: Weight decay of AdamW and SGD, decoupled from the gradient: each step
            subtracts `learning_rate * weight_decay * weight`.
        schedule: `"constant"`; `"cosine"` to 0; `"warm_cosine"`, the same after a linear rise
            in the first tenth of the steps; or `"steps"`: a tenth from half of the training on, a
            hundredth from three quarters on.
        clip_norm: Each worker's gradient is clipped to `clip_norm / sqrt(workers)` before any
            method's exchange, as by `RedSync.clip_norm`. `None` for no clipping.
        augment: Whether images are shifted and mirrored.
        evaluations: Number of evaluations on the test set during the training.
    """

    task: str
    model: str
    workers: int
    real: bool
    steps: int
    batch: int
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    schedule: str
    clip_norm: float | None
    augment: bool
    evaluations: int

    @property
    def of_task(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def evaluated_at(self) -> list[int]:
        """The numbers of steps after which the test set is evaluated, including the last one."""
        count = self.evaluations
        return sorted({math.ceil(self.steps * i / count) for i in range(1, count + 1)})

    def common(self, found: Data) -> dict[str, Any]:
        """Returns the settings with the source of the data, in the form of reports and states."""
        return {**dataclasses.asdict(self), "data": found.source}

    def network(self, found: Data, seed: int) -> keras.Model:
        """Returns the network with the initial weights of a seed."""
        import keras

        keras.utils.set_random_seed(seed)
        make = self.of_task.networks[self.model]
        return make(found.train[0].shape[1:], found.classes)

    def rate(self) -> float | keras.optimizers.schedules.LearningRateSchedule:
        """Returns the learning rate or its schedule."""
        import keras

        schedules = keras.optimizers.schedules
        if self.schedule == "cosine":
            return schedules.CosineDecay(self.learning_rate, self.steps)
        if self.schedule == "warm_cosine":
            rise = max(1, round(WARM_UP * self.steps))
            return schedules.CosineDecay(
                0.0, max(1, self.steps - rise), warmup_target=self.learning_rate, warmup_steps=rise
            )
        if self.schedule == "steps":
            ends = [self.steps // 2, 3 * self.steps // 4]
            rates = [self.learning_rate / by for by in (1, 10, 100)]
            return schedules.PiecewiseConstantDecay(ends, rates)
        return self.learning_rate

    def inner_optimizer(
        self, traits: Traits, clipping: bool = False, rate_first: bool = False
    ) -> keras.optimizers.Optimizer:
        """Returns the inner optimizer.

        Args:
            traits: Those of the method. If the exchange applies momentum, SGD has none, and Adam
                and its variants have a beta_1 of 0. If it needs SGD, it gets that, without
                momentum.
            clipping: Whether it clips gradients.
            rate_first: Whether gradients have been multiplied by the learning rate already.
        """
        import keras

        import tf_redsync as rs

        rate = 1.0 if rate_first else self.rate()
        clip = None
        if clipping and self.clip_norm is not None:
            clip = self.clip_norm * self.workers**-0.5
        momentum = 0.0 if traits.momentum_in_exchange or traits.needs_sgd else self.momentum
        if self.optimizer == "sgd" or traits.needs_sgd:
            decay = self.weight_decay or None
            return keras.optimizers.SGD(
                rate, momentum=momentum, weight_decay=decay, global_clipnorm=clip
            )
        common = {"learning_rate": rate, "beta_1": momentum, "global_clipnorm": clip}
        if self.optimizer == "adamw":
            return keras.optimizers.AdamW(weight_decay=self.weight_decay, **common)
        if self.optimizer == "amsgrad":
            return rs.AMSGrad(**common)
        if self.optimizer == "muon":
            return rs.Muon(
                rate,
                momentum=0.95 if momentum else 0.0,
                adam_beta_1=momentum,
                weight_decay=self.weight_decay,
                adam_weight_decay=self.weight_decay,
                global_clipnorm=clip,
                exclude_layers=["positions", "characters", "logits"],  # of `networks.transformer`
            )
        return keras.optimizers.Adam(amsgrad=self.optimizer == "adam_amsgrad", **common)

    def rows(self, examples: int, seed: int) -> Rows:
        """Returns the order of the examples."""
        return Rows(examples, self.workers, self.batch, seed)


class Rows:
    """Each worker's examples of every step: a new permutation of all in every epoch.

    Args:
        examples: Number of examples.
        workers: Number of workers that share a step's examples.
        batch: Examples per worker and step.
        seed: Seed of the permutations.
    """

    def __init__(self, examples: int, workers: int, batch: int, seed: int):
        self.examples, self.workers, self.batch, self.seed = examples, workers, batch, seed
        self.steps_per_epoch = steps_per_epoch(examples, workers, batch)
        self._epoch, self._order = -1, np.arange(0)

    def __call__(self, step: int) -> np.ndarray:
        """Returns the rows of a step, `[workers, batch]`; deterministic."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.examples)
            self._epoch = epoch
        size = self.workers * self.batch
        return self._order[place * size : (place + 1) * size].reshape(self.workers, self.batch)

    def generator(self, step: int, worker: int) -> np.random.Generator:
        """Returns a random generator for a worker's batch."""
        return np.random.default_rng((self.seed, step, worker))


def steps_per_epoch(examples: int, workers: int, batch: int) -> int:
    """Returns the number of full batches per epoch.

    Raises:
        ValueError: if there is none.
    """
    found = examples // (workers * batch)
    if not found:
        raise ValueError(
            f"a step must not take more than the {examples} training examples. Received: "
            f"{workers} workers with --batch={batch}"
        )
    return found


def examples(
    settings: Settings, found: Data, rows: Rows, step: int, worker: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a worker's inputs and labels of a step."""
    x, y = found.train
    own = rows(step)[worker]
    augment = rows.generator(step, worker) if settings.augment else None
    return found.inputs(x[own], augment), y[own]
