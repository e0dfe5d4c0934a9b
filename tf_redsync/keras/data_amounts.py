"""Comparison of the workers' numbers of batches when `fit`, `evaluate` or `predict` begins.

A worker with more batches than another one would deadlock in a collective. Workers with infinite
and with finite datasets would deadlock, too, because only finite datasets may communicate before a
batch.

Names of Keras used here: `_distributed_dataset` and the public `num_batches` of Keras 3's epoch
iterator, and `_dataset` and the public `inferred_steps` of tf_keras's data handler.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.errors import first_lines
from tf_redsync.keras import first_batch, fit_resume, known_batches, models
from tf_redsync.keras.accuracy import AccuracyWarning
from tf_redsync.network import collectives, strategies

_INFINITE = int(tf.data.INFINITE_CARDINALITY)

Amount = Sequence[int | None]  # Keras's steps per epoch and the dataset's cardinality, in batches


def compare(model: Any, method: str, params: dict[str, Any], validation: int = 0) -> None:
    """Compare the numbers of batches of all workers, which must call it at the same point.

    Args:
        model: The model.
        method: Name of the model's method, for the message.
        params: The `params` of Keras's callbacks.
        validation: The number of this validation in `fit`, from 1, which `params` do not describe.
            Later ones skip the hash of the first rows, which loads a batch of a `PyDataset`.

    Raises:
        Disagreement: on all workers, if some workers would deadlock.
    """
    strategy = model.distribute_strategy
    data = _running_data(model)
    steps = _steps(data) if validation else params.get("steps")
    batches = digest = seed = shuffles = shards = None
    known = known_batches.in_epoch(data) if method == "fit" else 0
    if strategies.is_redsync_strategy(strategy):
        batches = _cardinality(data)
        if strategies.process_count(strategy) > 1:
            digest = first_batch.first_digest(data) if validation < 2 else None
            seed = first_batch.shuffle_seed(data)
            shuffles, shards = first_batch.dataset_seeds(data), first_batch.dataset_shards(data)
    if method == "fit" and steps is None and batches == _INFINITE:
        warnings.warn(
            "`fit` has an infinite dataset and no `steps_per_epoch`, so its first epoch never ends."
            " Pass `steps_per_epoch`, or leave out `dataset.repeat()`.",
            stacklevel=2,
        )
    own_amount = None if steps is None else int(steps), batches
    own_epochs = 1  # each evaluation begins with the first batch
    if method == "fit":
        own_epochs = int(params.get("epochs") or 1) - fit_resume.initial_epoch(model)
    text = json.dumps([own_amount, own_epochs, digest, seed, shuffles, shards, known])
    texts = agreement.gather_texts(strategy, f"begin `{method}` with its data", text)
    amounts, epochs, digests, seeds, orders, all_shards, all_known = zip(
        *map(json.loads, texts), strict=True
    )
    different = conflict(amounts, max(epochs), method)
    if different is not None:
        raise agreement.Disagreement(different)
    messages = (
        first_batch.data_warning(digests, method),
        first_batch.shuffle_warning(seeds, method),
        first_batch.dataset_warning(orders, method),
        first_batch.shard_warning(all_shards, method),
    )
    for warning in filter(None, messages):
        warnings.warn(warning, stacklevel=2)
    if method == "fit" and hasattr(strategy, "known_batches"):
        strategy.known_batches.begin(min(all_known))


def _running_data(model: Any) -> Any:
    """Return the data of the model's innermost running `fit`, `evaluate` or `predict`.

    Returns:
        The epoch iterator of Keras 3 or the data handler of tf_keras; `None` if the model overrides
        the method.
    """
    variables = models.running_locals(model, "fit", "evaluate", "predict")
    return variables.get("epoch_iterator", variables.get("data_handler"))


def _steps(data: Any) -> int | None:
    """Return Keras's number of batches per epoch; `None` if unknown."""
    return getattr(data, "num_batches", None) or getattr(data, "inferred_steps", None)


def _cardinality(data: Any) -> int | None:
    """Return the cardinality of the distributed dataset, in batches; `None` if unknown."""
    dataset = getattr(data, "_distributed_dataset", None) or getattr(data, "_dataset", None)
    return None if dataset is None else int(dataset.cardinality)


def conflict(amounts: Sequence[Amount], epochs: int, method: str) -> str | None:
    """Return an error message if workers with different amounts would deadlock, else `None`.

    Args:
        amounts: The amounts of data, by rank.
        epochs: Number of epochs that will run.
        method: Name of the model's method, for the message.
    """
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
    argument = "steps_per_epoch" if method == "fit" else "steps"
    smallest = min(known or [n for n in steps if n is not None], default="n")
    return "\n".join(
        [
            f"the workers disagree: `{method}` has different amounts of data, which would deadlock "
            "some workers:",
            *first_lines(lines),
            f"Use the same number of batches on all workers: `dataset.take({smallest})`, or "
            f"`x[:n]` for arrays, or `dataset.repeat()` with the same `{argument}`.",
        ]
    )


def _described(steps: int | None, batches: int | None) -> str:
    if batches == _INFINITE:
        data = "an infinite dataset"
    elif batches is not None and batches >= 0:
        data = f"{batches} batches"
    elif steps is None:
        data = "a dataset of unknown length"
    else:  # such as arrays
        data = f"{steps} batches"
    return data if steps is None else f"{data}, {steps} per epoch"


_MOST = tf.int64.max


class BatchRows:
    """The number of rows of this worker's smallest batch in `fit` or an evaluation."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            most = tf.constant(_MOST, tf.int64)
            self._least = collectives.OneDeviceVariable(most, trainable=False)
        self._warned = False

    def begin(self) -> None:
        """Reset the minimum for a new `fit` or evaluation."""
        self._least.assign(_MOST)

    def note(self, batch: Any) -> None:
        """Record the number of rows of a batch, in the step that uses it."""
        rows = next(
            (tf.shape(t, tf.int64)[0] for t in tf.nest.flatten(batch) if _has_rows(t)), None
        )
        if rows is not None:
            least = tf.minimum(self._least.read_value(), rows)
            self._least.assign(least, read_value=False)

    def as_text(self) -> str:
        """Return the minimum as text for the other workers; "" before the first step."""
        least = int(self._least.numpy())
        return "" if least == _MOST else str(least)

    def compare(self, texts: Sequence[str], metrics: dict[str, Any] | None = None) -> None:
        """Warn once if the minima differ.

        Args:
            texts: The minima as text, by rank; "" disables the comparison.
            metrics: The results of an evaluation, which warns only if empty batches made them NaN;
                `None` for `fit`.
        """
        if self._warned or len(set(texts)) < 2 or "" in texts:
            return
        if metrics is not None and not ("0" in texts and _has_nan(metrics)):
            return
        self._warned = True
        text = _text([int(rows) for rows in texts], trains=metrics is None)
        warnings.warn(text, AccuracyWarning, stacklevel=2)


def _has_rows(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank is not None and value.shape.rank > 0


def _has_nan(metrics: dict[str, Any]) -> bool:
    return any(np.any(np.not_equal(v, v)) for v in tf.nest.flatten(metrics))


def _text(rows: Sequence[int], trains: bool) -> str:
    some = ", ".join(f"worker {rank}: {n}" for rank, n in list(enumerate(rows))[:8])
    without = sum(n == 0 for n in rows)
    if without:
        effect = (
            f"{without} of {len(rows)} workers had no rows. Losses and metrics that return one "
            "mean per batch are NaN for no rows, and so is their mean over the workers."
        )
        if trains:
            effect += (
                f" A gradient of 0 scaled that step by {len(rows) - without}/{len(rows)}, or, in a "
                "model with `BatchNormalization`, a NaN skipped it."
            )
    else:
        effect = (
            "Each worker's gradient is the mean over its own rows, and workers have equal weight, "
            "so rows of a worker with fewer rows have more weight."
        )
    return (
        f"workers had different numbers of rows in a batch of `{'fit' if trains else 'evaluate'}`. "
        f"{effect} Use batches of a multiple of "
        f"{len(rows)} rows without a remainder: `dataset.batch(size, drop_remainder=True)`, or "
        "arrays whose length is a multiple of `batch_size`. Received: rows in the smallest batch: "
        f"{some}{', ...' if len(rows) > 8 else ''}"
    )
