"""Detects workers whose weights or learning rates differ, by a periodic comparison of their bits.

All workers gather a fingerprint of each weight in the first step of a run or a `fit`, and every
`every` steps after it. `keras/consistency.py` compares them once more when `fit` ends. The branch
depends on a counter that is equal on all workers. Workers that apply the same updates stay equal to
the last bit. A difference therefore has another cause: another learning rate, other hyper-
parameters, or weights that only one worker has loaded.
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.errors import DistributedError, first_lines
from tf_redsync.exchange.driver import Network, gather
from tf_redsync.network import strategies
from tf_redsync.ops import native, wire
from tf_redsync.ops.wire import as_row, joined, map_words
from tf_redsync.step import state_variables
from tf_redsync.step.branches import run_on_host
from tf_redsync.step.state_variables import Consensus

DEFAULT_EVERY = 500
CHOICES = ("error", "restore")
_WORDS = 2  # int32 words per number and per fingerprint
_logger = logging.getLogger("tf_redsync")


class Drifted(DistributedError):
    """The weights or learning rates of the workers differ."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """A variable that must be equal on all workers.

    Attributes:
        name: Its name in messages.
        copies: This process's variables, one for each replica. With local steps, the agreed weight
            and the worker's own.
        applies: Returns whether a difference counts, equal on all workers; `None` for always.
    """

    name: str
    copies: Sequence[tf.Variable]
    applies: Callable[[], bool] | None = None


class DriftDetector:
    """Compares weights and scalars of all workers every `every` steps.

    Args:
        exchange: A built `GradientExchange`, whose network works in branches as well. With local
            steps, a variable's last copy is compared while the workers have the agreed weights,
            else its first.
        every: The interval, in steps.
        on_drift: `"error"` raises; `"restore"` copies the weights of worker 0, which warns.
        numbers: Returns scalars by name that must be equal, such as the learning rate. A difference
            always raises `Drifted`, because restored weights would drift apart again.
        weights: Returns the variables that must be equal, the same in each call.
        slots: Returns the variables that are restored together with the weights.
    """

    def __init__(
        self,
        exchange: Any,
        every: int,
        on_drift: str,
        numbers: Callable[[], dict[str, tf.Tensor]],
        weights: Callable[[], Sequence[Shared]],
        slots: Callable[[], Sequence[Shared]],
    ):
        self._network: Network = exchange.network
        self._consensus: Consensus | None = exchange.consensus
        self._every, self._on_drift = every, on_drift
        self._numbers, self._weights, self._slots = numbers, weights, slots
        self._rank, self._clock = strategies.process_rank(exchange.strategy), exchange.step
        self._steps = state_variables.counter("drift_steps")
        self._restored = 0  # number of times
        self._of_numbers: list[str] = []  # the names of the numbers

    def step(self) -> None:
        """Compare the workers after a step if a comparison is due; all workers must call it."""
        steps = self._steps.read_value()
        self._steps.assign_add(1, read_value=False)
        tf.cond(tf.equal(steps % self._every, 0), self._compare, lambda: None)

    def compare_in_next_step(self) -> None:
        """Compare after the next step. All workers must call it, between two steps."""
        self._steps.assign(0)

    def _compare(self) -> None:
        numbers, weights = self._numbers(), self._weights()
        words = [number_words(n) for n in numbers.values()]
        rows = gather(self._network, joined(*words, self.seals()))  # [workers, words]

        self._of_numbers = list(numbers)

        def react() -> None:
            # Weights are restored only if the report does not raise.
            reported = run_on_host(self._report, [rows, self._clock.read_value()])
            if self._on_drift == "restore":
                with tf.control_dependencies([] if reported is None else [reported]):
                    for shared in (*weights, *self._slots()):
                        self._copy_from_first(shared)

        tf.cond(tf.reduce_any(tf.not_equal(rows, rows[:1])), react, lambda: None)

    def seals(self) -> tf.Tensor:
        """Return the fingerprints of this worker's weights, int32 `[2 N]`."""
        copies = [w.copies for w in self._weights()]
        values = self._of_agreed(lambda i: wire.from_words(fingerprints([c[i] for c in copies])))
        return wire.to_words(values)

    def _of_agreed(self, of_copy: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """Return `of_copy(index)`, float, of the copies with the agreed values.

        On a GPU a branch would move int32 results to host memory.
        """
        if self._consensus is None:
            return of_copy(0)
        together = tf.equal(self._consensus.steps, 0)
        return tf.cond(together, lambda: of_copy(-1), lambda: of_copy(0))

    def _copy_from_first(self, shared: Shared) -> None:
        """Set a variable to the bits of worker 0's value."""
        value = self._of_agreed(lambda copy: shared.copies[copy].read_value())
        # A gather would need memory for every worker's value. Only worker 0 sends its bits, so the
        # sum of 16-bit numbers is exact. TensorFlow adds int32 in host memory, also on a GPU.
        numbers = tf.cast(tf.bitcast(value, tf.uint16), tf.float32)
        sent = tf.where(tf.equal(self._network.rank(), 0), numbers, tf.zeros_like(numbers))
        (received,) = self._network.all_reduce([sent])
        bits = tf.bitcast(tf.cast(received, tf.uint16), value.dtype)
        for copy in shared.copies:
            copy.assign(bits, read_value=False)

    def _report(self, received: tf.Tensor, step: tf.Tensor) -> None:
        self._report_rows(received.numpy(), self._of_numbers, int(step))

    def report_last(self, seals: Sequence[Sequence[int]]) -> None:
        """Report differences after the last step of a `fit`.

        Args:
            seals: The results of `seals` of all workers.

        Raises:
            Drifted: The workers differ, and `on_drift` is "error". "restore" only warns.
        """
        self._report_rows(np.array(seals, np.int32), [], None)

    def _report_rows(self, rows: np.ndarray, of_numbers: list[str], step: int | None) -> None:
        weights, numbers = self._weights(), len(of_numbers)
        names = [*of_numbers, *(w.name for w in weights)]
        pairs = rows.reshape(len(rows), -1, _WORDS)  # [workers, numbers and weights, words]
        differ = (pairs != pairs[:1]).any(axis=-1)
        differ[:, numbers:] &= [w.applies is None or w.applies() for w in weights]
        if not differ.any():
            return
        lines = []
        for rank in differ.any(axis=-1).nonzero()[0]:
            first, *more = differ[rank].nonzero()[0]
            subject = names[first] if first < numbers else f"bits of {names[first]!r}"
            value, chiefs = (_text(pairs[r, first], first < numbers) for r in (rank, 0))
            others = f", and {len(more)} more differ" if more else ""
            lines.append(f"worker {rank} has the {subject} {value}, worker 0 has {chiefs}{others}")
        text = f"the workers have drifted apart: {'; '.join(first_lines(lines, of=' workers'))}."
        if self._on_drift == "restore" and not differ[:, :numbers].any():
            self._warn(text, step)
            return
        raise Drifted(
            f"{text} Give all workers the same callbacks, hyper-parameters and weights. A worker "
            "whose gradient of a variable is `None` does not update it, while the others do. A "
            "step that perturbs weights, as in SAM, must assign the stored values afterwards. "
            "Machines of different types may round differently: with them pass on_drift='restore' "
            f"to DistributedOptimizer. The check runs every check_every={self._every} steps and "
            "when `fit` ends."
        )

    def _warn(self, text: str, step: int | None) -> None:
        """Warn on worker 0: of restoration 1, 2, 4, 8 ..., or at the end of a `fit` (no step)."""
        if step is None:
            restored = "The next `fit` begins with a comparison, which restores the weights."
        else:
            self._restored += 1
            restored = (
                f"All workers take the weights of worker 0 at step {step}. This is restoration "
                f"{self._restored}; the next warning is at {2 * self._restored}."
            )
        if self._rank == 0 and (step is None or self._restored.bit_count() == 1):
            _logger.warning("%s %s", text, restored)


def fingerprints(variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Return checksums of the bits of N variables, int32 `[2 N]`: a checksum and a 0 for each.

    NaNs with equal bits have equal checksums. The checksums are those of messages (`ops/wire.py`),
    which are equal on every backend and device. The native op reads the variables by their handles.
    """
    words = all(v.dtype.size in (4, 8) for v in variables)
    if words and native.are_on_cpus(variables) and native.runs_natively(variables):
        handles = [variable.handle for variable in variables]
        seals = native.load().redsync_seal_variables(variables=handles)[:, tf.newaxis]
    else:
        seals = joined(*(_seal(v.read_value()) for v in variables))
    return map_words(lambda s: tf.reshape(tf.pad(s, [[0, 0], [0, _WORDS - 1]]), [-1]), seals)


def _seal(value: tf.Tensor) -> tf.Tensor:
    """Return the first word of a sealed message with the bits of a tensor, int32 `[1, 1]`."""
    words = map_words(lambda w: tf.reshape(w, [-1]), _as_int32(value))
    message = wire.with_header(tf.constant(True), words)
    return map_words(lambda m: m[:, : wire.HEADER_WORDS], wire.sealed(as_row(message)))


def number_words(number: tf.Tensor) -> tf.Tensor:
    """Return the bits of a scalar as float64, int32 `[2]`."""
    return tf.bitcast(tf.cast(number, tf.float64), tf.int32)


def _as_int32(value: tf.Tensor) -> tf.Tensor:
    """Return the bits as int32: `[...]` for elements of up to 32 bits, else `[..., 2]`."""
    if value.dtype.size == 2:
        return tf.cast(tf.bitcast(value, tf.int16), tf.int32)
    return tf.bitcast(value, tf.int32)


def _text(words: np.ndarray, is_number: bool) -> str:
    data: Any = words.astype("<i4").tobytes()
    if not is_number:
        return data.hex()
    number = struct.unpack("<d", data)[0]
    short = np.float32(number)
    return str(short) if float(short) == number else repr(number)
