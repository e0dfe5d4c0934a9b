"""Compares how many batches each worker has when `fit`, `evaluate` or `predict` begins.

A worker with more batches than another one would wait for it in a collective for ever. So would one
with a finite dataset beside one with an infinite one: only finite datasets ask the other workers
before each batch whether anyone still has data.

Names of Keras used here, of a model in `fit` that has validation data: `_eval_epoch_iterator` of
Keras 3 with its public `num_batches`, and `_eval_data_handler` of tf_keras with `inferred_steps`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.keras import generators
from tf_redsync.keras.accuracy import AccuracyWarning
from tf_redsync.network import collectives
from tf_redsync.step import strategy_hooks

_INFINITE = int(tf.data.INFINITE_CARDINALITY)
_MAX_LINES = 16

Amount = Sequence[int | None]  # steps that Keras will run, and the dataset's cardinality; if known


def compare(model: Any, method: str, params: dict[str, Any], in_fit: bool = False) -> None:
    """Compare this worker's number of batches with those of all others, which call it too.

    Args:
        model: The model; with one worker nothing happens.
        method: Its method, for the message.
        params: Of Keras's callbacks.
        in_fit: Whether this is a validation in `fit`, of which `params` say nothing.

    Raises:
        Disagreement: on all workers, if some would wait for others.
    """
    strategy = model.distribute_strategy
    steps = _validation_steps(model) if in_fit else params.get("steps")
    batches, digest = strategy_hooks.taken_data(strategy)
    own = None if steps is None else int(steps), batches, digest
    told = agreement.gather_texts(strategy, f"begin `{method}` with its data", json.dumps(own))
    amounts = [json.loads(text) for text in told]
    found = conflict([amount[:2] for amount in amounts], params.get("epochs") or 1, method)
    if found is not None:
        raise agreement.Disagreement(found)
    warning = generators.warning_of([digest for _, _, digest in amounts], method)
    if warning is not None:
        warnings.warn(warning, stacklevel=2)


def conflict(amounts: Sequence[Amount], epochs: int, method: str) -> str | None:
    """Return why workers with these amounts, by rank, would wait for each other, or `None`."""
    steps = [one for one, _ in amounts]
    batches = [n for _, n in amounts if n is not None]
    known = [n for n in batches if n >= 0]
    equal_steps, equal_kinds = len(set(steps)) == 1, len({n == _INFINITE for n in batches}) <= 1
    enough = bool(known) and steps[0] is not None and steps[0] * epochs <= min(known)
    if equal_steps and equal_kinds and (len(set(known)) <= 1 or enough):
        return None
    ranks: dict[tuple[int | None, ...], list[int]] = {}
    for rank, amount in enumerate(amounts):
        ranks.setdefault(tuple(amount), []).append(rank)
    lines = [f"worker {', '.join(map(str, r))}: {_described(*a)}" for a, r in ranks.items()]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"and {len(lines) - _MAX_LINES} more"]
    argument = "steps_per_epoch" if method == "fit" else "steps"
    smallest = min(known or [n for n in steps if n is not None], default="n")
    return "\n".join(
        [
            f"the workers disagree: `{method}` has different amounts of data, and some workers "
            "would wait for batches of others:",
            *lines,
            f"Give all workers the same number of batches by `dataset.take({smallest})`, arrays by "
            f"`x[:n]`; or use `dataset.repeat()` and the same `{argument}` on all of them.",
        ]
    )


def _described(steps: int | None, batches: int | None) -> str:
    if batches == _INFINITE:
        data = "an infinite dataset"
    elif batches is not None and batches >= 0:
        data = f"{batches} batches"
    elif steps is None:
        data = "a dataset of unknown length"
    else:  # arrays, say
        data = f"{steps} batches"
    return data if steps is None else f"{data}, {steps} in an epoch"


def _validation_steps(model: Any) -> int | None:
    iterator = getattr(model, "_eval_epoch_iterator", None)
    if iterator is not None:
        return iterator.num_batches
    return getattr(getattr(model, "_eval_data_handler", None), "inferred_steps", None)


_MOST = tf.int64.max


class BatchRows:
    """This worker's smallest batch in the steps of `fit`."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            most = tf.constant(_MOST, tf.int64)
            self._least = collectives.OneDeviceVariable(most, trainable=False)
        self._warned = False

    def begin(self) -> None:
        """Forget the batches of an earlier `fit`."""
        self._least.assign(_MOST)

    @tf.autograph.experimental.do_not_convert
    def note(self, batch: Any) -> None:
        """Note the rows of a batch, in the step that trains on it."""
        rows = next(
            (tf.shape(t, tf.int64)[0] for t in tf.nest.flatten(batch) if _has_rows(t)), None
        )
        if rows is not None:
            least = tf.minimum(self._least.read_value(), rows)
            self._least.assign(least, read_value=False)

    def told(self) -> str:
        """Return what to tell the other workers: the number, or nothing before the first step."""
        least = int(self._least.numpy())
        return "" if least == _MOST else str(least)

    def compare(self, all_told: Sequence[str]) -> None:
        """Warn once where the smallest batches of all workers, by rank, are not alike."""
        if self._warned or len(set(all_told)) < 2 or "" in all_told:
            return
        self._warned = True
        warnings.warn(_text([int(rows) for rows in all_told]), AccuracyWarning, stacklevel=2)


def _has_rows(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank is not None and value.shape.rank > 0


def _text(rows: Sequence[int]) -> str:
    some = ", ".join(f"worker {rank}: {n}" for rank, n in list(enumerate(rows))[:8])
    without = sum(n == 0 for n in rows)
    effect = (
        f"{without} of {len(rows)} workers had no rows and sent a gradient of 0, so that step was "
        f"{len(rows) - without}/{len(rows)} as long."
        if without
        else "Each worker's gradient is the mean over its own rows, and all workers count alike: "
        "the rows of a worker with fewer of them counted for more."
    )
    return (
        f"workers had different numbers of rows in a batch. {effect} Use batches of a multiple of "
        f"{len(rows)} rows and leave out the rest: `dataset.batch(size, drop_remainder=True)`, or "
        "arrays whose length is a multiple of `batch_size`. Received: rows in the smallest batch: "
        f"{some}{', ...' if len(rows) > 8 else ''}"
    )
