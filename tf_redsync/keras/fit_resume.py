"""Resumes `fit` at a given epoch and batch.

Neither Keras 3 nor tf_keras can begin in the middle of an epoch. The batches before the position
are therefore drawn from the data and dropped, without callbacks. The order of data that are
reshuffled in every epoch depends on the number of earlier iterators. Unless the data are known not
to shuffle, iterators of earlier epochs are therefore created, too. Batches are drawn from them only
where that changes the order (`batches_of_past`), or if all epochs share an iterator.

`fit` keeps its state in local variables, which are read from its frame. Names used here: of Keras 3
the variable `epoch_iterator` with `_enumerate_iterator`, `_get_iterator`, `_num_batches` and
`_current_iterator`, and a model's `_initial_epoch` and `_symbolic_build`; of tf_keras the variables
`data_handler` with `enumerate_epochs`, `_initial_epoch`, `_adapter` and `_inferred_steps`, and
`iterator`, and a model's `_training_state`, which gives the first epoch and batch; of both
`callbacks` and `initial_epoch`, and a model's `train_function`. A data adapter's `_shuffle` and
`_dataset`, `_inputs` and `_seed` of a shuffled `tf.data`, and `_datasets`, `_original_dataset` and
`_strategy` of a distributed dataset.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_redsync.keras import first_batch, models

# Stages whose order does not depend on earlier iterators. Others may, such as a `flat_map` whose
# function captures a shuffle.
_KEEPS_ORDER = re.compile(
    "_?(Tensor|TensorSlice|Range|TFRecord|TextLine|FixedLengthRecord|Zip|Concatenate|Repeat|Take|"
    "Skip|Shard|Cache|Filter|(Parallel)?(Map|Batch)|PaddedBatch|Unbatch|Prefetch|Options)"
    "Dataset(V2)?"
)


class Position:
    """Position of the running `fit`, which `resume_at` changes before the first epoch.

    Create an instance within `on_train_begin`.

    Args:
        model: A model of Keras 3 or tf_keras.
    """

    def __init__(self, model: Any):
        self._model = model
        variables = models.running_locals(model, "fit")
        self._keras3: Any = variables.get("epoch_iterator")
        self._tf_keras: Any = variables.get("data_handler")
        self._then: Callable[[Callable[[], None]], None] | None = None

    @property
    def order_warning(self) -> str:
        """Reason why the order of batches may differ in another run; `""` if none is known."""
        data = self._keras3 or self._tf_keras
        if data is None:
            return "the model overrides `fit`"
        adapter = getattr(data, "data_adapter", None) or data._adapter
        kind = type(adapter).__name__
        if kind in ("TFDatasetAdapter", "DatasetAdapter"):
            shuffled = _shuffled_without_seed(adapter._dataset)
            return "the data are shuffled without a seed" if shuffled else ""
        if kind in ("ArrayDataAdapter", "TensorLikeDataAdapter"):
            return "`fit` shuffles arrays" if adapter._shuffle else ""
        return f"Python code yields the data ({kind})"

    def resume_at(self, epoch: int, batch: int, past: int) -> None:
        """Set the position at which `fit` begins.

        Args:
            epoch: First epoch, from 0; the number of epochs if the training is complete.
            batch: First batch of this epoch, from 0.
            past: Number of earlier epochs.

        Raises:
            ValueError: the model's `fit` does not call Keras's, or no execution of Keras 3 begins
                at `batch`.
        """
        if self._keras3 is not None:
            at_once = self._keras3.steps_per_execution
            if batch % at_once:
                raise ValueError(
                    f"`Checkpoint` cannot resume at batch {batch} of an epoch in executions of "
                    f"{at_once} batches. Compile the model with the `steps_per_execution` of the "
                    f"saved run, or another divisor of {batch}. Received: "
                    f"steps_per_execution={at_once}"
                )
            self._model._initial_epoch = epoch
            self._then = lambda ended: self._begin_keras3(batch, past, ended)
        elif self._tf_keras is not None:
            self._model._training_state = _Counters(epoch, batch)
            self._then = lambda ended: self._begin_tf_keras(batch, ended)
            _pass_epochs_tf_keras(self._tf_keras, past)
        else:
            raise ValueError(
                "`Checkpoint` cannot find the epochs and batches of Keras's `fit`. Call "
                "`super().fit(...)` in the model's `fit`. Received: "
                f"{type(self._model).__name__} with a `fit` of its own"
            )

    def epoch_begins(self, ended: Callable[[], None]) -> None:
        """Drop the batches that were already processed; call it within `on_epoch_begin`.

        Args:
            ended: Called later if all batches of the epoch turn out to be processed. By then,
                tf_keras has created the model's metrics.
        """
        then, self._then = self._then, None
        self.reset()
        if then is not None:
            then(ended)

    def reset(self) -> None:
        """Reset the position for the next `fit`."""
        if self._keras3 is not None:
            self._model._initial_epoch = None
        elif self._tf_keras is not None and isinstance(self._model._training_state, _Counters):
            self._model._training_state = None

    def _begin_keras3(self, batch: int, past: int, ended: Callable[[], None]) -> None:
        dropped: list[Any] = []
        _begin_keras3(self._keras3, batch, past, dropped)

        def build_and_end() -> None:
            # Without a strategy, Keras 3.16 draws a batch before it builds the metrics.
            self._model._symbolic_build(data_batch=dropped[-1])
            ended()

        if batch and self._keras3.num_batches is None:
            _handle_end_of_epoch(self._model, build_and_end)

    def _begin_tf_keras(self, batch: int, ended: Callable[[], None]) -> None:
        _drop(models.running_locals(self._model, "fit")["iterator"], batch, least=batch)
        if batch and self._tf_keras._inferred_steps is None:
            _handle_end_of_epoch(self._model, ended)


def _handle_end_of_epoch(model: Any, ended: Callable[[], None]) -> None:
    """Handle an epoch whose batches were all processed, in data of unknown size.

    Only drawing the next batch detects this. `fit` still needs the results of a step: without them
    callbacks of Keras 3 would receive no metrics, and tf_keras would fail. The step therefore
    returns the metrics' results, and then the epoch ends before callbacks receive a batch.

    Args:
        model: The model in `fit`.
        ended: Called if all batches of the epoch were processed.
    """
    step, callbacks = model.train_function, models.running_locals(model, "fit")["callbacks"]

    def first(iterator: Any) -> Any:
        model.train_function = step
        try:
            return step(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            pass

        def at_the_end(*args: Any) -> None:
            del callbacks.on_train_batch_end
            raise StopIteration

        callbacks.on_train_batch_end = at_the_end
        ended()
        return model.get_metrics_result()

    model.train_function = first


class _Counters:
    """Stand-in for tf_keras's training state, with the first epoch and batch."""

    def __init__(self, epoch: int, batch: int):
        self._place = epoch, batch

    def maybe_load_initial_counters_from_ckpt(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the first epoch and its first batch."""
        return self._place


def initial_epoch(model: Any) -> int:
    """Return the argument `initial_epoch` of the running `fit`; 0 if the model overrides `fit`."""
    return int(models.running_locals(model, "fit").get("initial_epoch") or 0)


def steps_of_own_shard(model: Any) -> int | None:
    """Return the number of steps of a pass over the shard that the running `fit` reads.

    The replicas of a process take the batches of a dataset from `distribute_datasets_from_function`
    in turn. Keras 3 assumes one step per batch instead; tf_keras does not infer the number.

    Args:
        model: A model in `fit`.

    Returns:
        The number of steps; `None` for other data and for datasets of unknown or infinite length.
    """
    epochs = models.running_locals(model, "fit").get("epoch_iterator")
    data = getattr(getattr(epochs, "data_adapter", None), "_dataset", None)
    if not isinstance(data, tf.distribute.DistributedDataset) or not hasattr(data, "_datasets"):
        return None
    return steps_of_shard(data)


def steps_of_shard(data: Any) -> int | None:
    """Return the number of steps over a dataset of `distribute_datasets_from_function`."""
    batches = int(data._datasets[0].cardinality())
    replicas = len(data._strategy.extended.worker_devices)
    return math.ceil(batches / replicas) if batches > 0 else None


def _begin_keras3(epoch_iterator: Any, batch: int, past: int, dropped: list[Any]) -> None:
    """Start the next epoch of an iterator at `batch`, after `past` epochs.

    `dropped` then holds the last batch before the position.
    """
    enumerate_epoch = epoch_iterator._enumerate_iterator
    at_once = epoch_iterator.steps_per_execution
    one_for_all = epoch_iterator.steps_per_epoch is not None

    def rest() -> Iterator[Any]:
        del epoch_iterator._enumerate_iterator  # for this epoch only
        for draws in batches_of_past(epoch_iterator.data_adapter, past, one_for_all):
            _pass_epoch(epoch_iterator, enumerate_epoch, draws)
        left = False
        for execution in enumerate_epoch():  # first step, last step since Keras 3.11, iterator
            begin, iterator = execution[0], execution[-1]
            if begin < batch:  # the last execution of an epoch may have fewer steps
                least = 1 if begin + at_once >= batch else at_once
                dropped[:] = [_drop(iterator, at_once, least)]
            else:
                left = True
                yield execution
        if not left:
            raise _too_few_batches_error()

    if batch or past:
        epoch_iterator._enumerate_iterator = rest


def _pass_epoch(
    epoch_iterator: Any, enumerate_epoch: Callable[[], Iterator[Any]], draws: int
) -> None:
    """Advance the data by an epoch; draw `draws` batches if the epoch has its own iterator."""
    one_for_all = epoch_iterator.steps_per_epoch is not None
    if not one_for_all and epoch_iterator._num_batches is None:  # may be infinite
        _drop(iter(epoch_iterator._get_iterator()), draws, least=0)
        return
    for *_, iterator in enumerate_epoch():
        if not one_for_all:
            _drop(iterator, draws, least=0)
            draws = 0
            continue
        try:
            for _ in range(epoch_iterator.steps_per_execution):
                next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            epoch_iterator._current_iterator = None
            return


def _pass_epochs_tf_keras(handler: Any, past: int) -> None:
    """Make a data handler advance the data by `past` epochs before its first epoch."""
    enumerate_epochs = handler.enumerate_epochs

    def rest() -> Iterator[Any]:
        one_for_all = not handler._adapter.should_recreate_iterator()
        passed = batches_of_past(handler._adapter, past, one_for_all)
        handler._initial_epoch -= len(passed)
        epochs = enumerate_epochs()
        for draws in passed:
            _, iterator = next(epochs)
            if one_for_all:
                _drop(iterator, handler._inferred_steps, least=handler._inferred_steps)
            else:
                _drop(iterator, draws, least=0)
        yield from epochs

    if past:
        handler.enumerate_epochs = rest


def batches_of_past(adapter: Any, past: int, one_for_all: bool) -> list[int]:
    """Return the number of batches to draw from each of the earlier epochs' iterators.

    Data in a fixed order need no earlier iterators, of which each takes about 0.1 s.

    The order of a shuffle changes with each of its iterators. Under another shuffle, the first
    batch creates this iterator; under `repeat` and `concatenate`, later batches create others. A
    cache over a shuffle keeps the order of the first epoch.

    Args:
        adapter: A data adapter of Keras 3 or tf_keras.
        past: Number of earlier epochs.
        one_for_all: Whether all epochs share an iterator, which has to pass them.
    """
    datasets = _own_datasets(getattr(adapter, "_dataset", None))
    kinds = [type(stage).__name__ for d in datasets for stage in first_batch.with_inputs(d)]
    ordered = bool(kinds) and all(map(_KEEPS_ORDER.fullmatch, kinds))
    if not one_for_all and (ordered or not getattr(adapter, "_shuffle", True)):
        return []
    over_shuffles = " ".join(
        type(stage).__name__
        for dataset in datasets
        if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY
        for stage in first_batch.with_inputs(dataset)
        if any("Shuffle" in type(s).__name__ for s in first_batch.with_inputs(stage)[1:])
    )
    if "Repeat" in over_shuffles or "Concatenate" in over_shuffles:
        return [sys.maxsize] * past
    draws = 1 if "Shuffle" in over_shuffles else 0
    return [sys.maxsize if "Cache" in over_shuffles else draws, *[draws] * (past - 1)][:past]


def _drop(iterator: Any, batches: int, least: int) -> Any:
    """Draw and drop batches, and return the last.

    Raises:
        ValueError: the data have fewer than `least` batches.
    """
    batch = None
    for drawn in range(batches):
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            if drawn < least:
                raise _too_few_batches_error() from error
            break
    return batch


def _too_few_batches_error() -> ValueError:
    return ValueError(
        "the data have fewer batches than the saved run has processed of this epoch. `Checkpoint` "
        "needs the same data and batch size as the saved run. Use another `directory` for another "
        "training."
    )


def _shuffled_without_seed(dataset: Any) -> bool:
    """Return whether a dataset, which may be distributed, has a shuffle without a seed."""
    stages = (s for d in _own_datasets(dataset) for s in first_batch.with_inputs(d))
    return any(map(_shuffles_without_seed, stages))


def _shuffles_without_seed(dataset: Any) -> bool:
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return "Shuffle" in type(dataset).__name__ and all(s is not None and not int(s) for s in seeds)


def _own_datasets(dataset: Any) -> list[tf.data.Dataset]:
    """Return the datasets of this process in data that may be distributed; of other data none."""
    distributed = isinstance(dataset, tf.distribute.DistributedDataset)
    found = datasets_of(dataset) if distributed else [dataset]
    return [d for d in found if isinstance(d, tf.data.Dataset)]


def datasets_of(dataset: Any) -> list[Any]:
    """Return the datasets of this process in a distributed dataset."""
    return getattr(dataset, "_datasets", None) or [dataset._original_dataset]
