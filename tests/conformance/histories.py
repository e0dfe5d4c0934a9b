"""Loopback workers whose state is saved and restored by the code of real training."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import tensorflow as tf

from tests.conformance.descriptor import Descriptor
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.state import saveable_exchange


class _Value:
    """An array with the variable methods that the state's code calls."""

    def __init__(self, array: Any):
        self.assign(array)

    def assign(self, array: Any) -> None:
        self._array = np.array(array, copy=True)
        self.dtype, self.shape = tf.as_dtype(self._array.dtype), self._array.shape

    def numpy(self) -> np.ndarray:
        return self._array


class _Copies(tuple[_Value, ...]):
    """A variable with one copy per worker."""

    def numpy(self) -> np.ndarray:
        return self[0].numpy()


class _OneProcess:
    """A strategy whose replicas are all workers, as with several GPUs in one process."""

    extended = None  # no other process

    def experimental_local_results(self, value: Any) -> tuple:
        return value if isinstance(value, tuple) else (value,)


@dataclasses.dataclass(frozen=True)
class _Bucket:
    method: Any
    layout: BucketLayout


@dataclasses.dataclass(frozen=True)
class _Schedule:
    buckets: tuple[_Bucket, ...]
    skips_locally: bool = False

    def resumed(self) -> None:
        pass

    def settle(self) -> None:
        pass


@dataclasses.dataclass
class _NonFinite:
    in_a_row: _Value


@dataclasses.dataclass
class _States:
    variables_by_name: dict[str, list[tuple[_Value, ...]]]
    kinds: dict[str, str]


class Workers(saveable_exchange.SaveableExchange):
    """All workers of an exchange of one bucket, in lockstep, each with its own weights.

    `state/saveable_exchange.py` saves and restores the state, as in training.

    Args:
        descriptor: Descriptor of the method.
        specs: The tensors.
        workers: Number of workers.
    """

    def __init__(self, descriptor: Descriptor, specs: tuple[TensorSpec, ...], workers: int):
        tf.Module.__init__(self, name="loopback_exchange")
        self.method, self.workers, self.run_id = descriptor.method, workers, 1
        self.layout = BucketLayout(specs, workers)
        self.strategy, self.consensus, self.network = _OneProcess(), None, None
        self.policy = self.resolved = object()
        self.warm_up = self.training = None
        self.schedule = _Schedule((_Bucket(self.method, self.layout),))
        self.step, self.skipped = _Value(np.int64(0)), _Value(np.int64(0))
        self.nonfinite = _NonFinite(_Value(np.int64(0)))
        if descriptor.start is None:
            state = self.method.init(self.layout)
        else:
            state = descriptor.start(self.method, specs)
        copies = {
            name: [_Copies(_Value(np.asarray(t)) for _ in range(workers)) for t in tensors]
            for name, tensors in state.items()
        }
        self.states = [_States(copies, dict(self.method.traits.state_kinds))]
        self.weights_of = [[np.zeros(s.shape, np.float32) for s in specs] for _ in range(workers)]

    def read(self) -> list[dict[str, list[tf.Tensor]]]:
        """State of each worker."""
        groups = self.states[0].variables_by_name.items()
        return [
            {name: [tf.constant(c[rank].numpy()) for c in group] for name, group in groups}
            for rank in range(self.workers)
        ]

    def phase(self) -> str:
        """The phase of the next step, by the method's sync schedule."""
        step, schedule = int(self.step.numpy()), self.method.sync_schedule
        phase = "dense_exchange" if step < schedule.warm_up_steps else "exchange"
        return next((name for until, name in schedule.phases if step < until), phase)

    def train(self, grads: list[list[np.ndarray]], rate: float) -> loopback.LoopbackStep:
        """Runs one step of all workers; a non-finite step changes only a counter."""
        inputs = [[tf.constant(g) for g in one] for one in grads]
        step = int(self.step.numpy())
        found = loopback.run_step(self.method, self.layout, inputs, self.read(), step, self.phase())
        if not found.finite:
            self.skipped.assign(self.skipped.numpy() + 1)
            self.nonfinite.in_a_row.assign(self.nonfinite.in_a_row.numpy() + 1)
            return found
        for rank, (state, totals) in enumerate(zip(found.states, found.totals, strict=True)):
            for name, group in self.states[0].variables_by_name.items():
                for copies, value in zip(group, state[name], strict=True):
                    copies[rank].assign(value)
            for weight, total in zip(self.weights_of[rank], totals, strict=True):
                weight -= np.float32(rate / self.workers) * np.asarray(total)
        self.step.assign(step + 1)
        self.nonfinite.in_a_row.assign(np.int64(0))
        return found

    def residuals(self) -> list[np.ndarray]:
        """Sum over the workers of each tensor's residuals."""
        group = self.states[0].variables_by_name.get("residual")
        if group is None:
            return [np.zeros(s.shape) for s in self.layout.specs]
        return [sum(np.float64(c.numpy()) for c in copies) for copies in group]

    def bits(self) -> list[bytes]:
        """Bits of the state and the weights of all workers, for comparison."""
        states = tf.nest.flatten(self.read())
        arrays = [np.asarray(value) for value in states] + tf.nest.flatten(self.weights_of)
        return [array.tobytes() for array in arrays]

    def save(self) -> bytes:
        """Returns a saved file."""
        weights = {
            f"weight/{rank}/{i}": weight
            for rank, weights in enumerate(self.weights_of)
            for i, weight in enumerate(weights)
        }
        file = io.BytesIO()
        np.savez(file, **self.worker_state(), **weights)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        """Resumes from a file saved by any number of workers."""
        with np.load(io.BytesIO(file), allow_pickle=False) as archive:
            found = dict(archive)
        weights = {name: found.pop(name) for name in list(found) if name.startswith("weight/")}
        for rank, own in enumerate(self.weights_of):
            source = rank if f"weight/{rank}/0" in weights else 0
            for i in range(len(own)):
                own[i] = weights[f"weight/{source}/{i}"].copy()
        self.restore_worker_states([found])
