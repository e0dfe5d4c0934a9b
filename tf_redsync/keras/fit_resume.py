"""Where in its epochs and batches `fit` goes on.

Neither Keras knows how to begin in the middle of an epoch with the batch that comes next, so the
batches before it are drawn from the data and dropped, without a callback hearing of them. What
shuffles anew in every epoch does so by how many iterators there were, so those of the epochs before
are made as well, without drawing from them.

`fit` keeps all this in local variables, hence the look at its frame. Names used here: of Keras 3
its `epoch_iterator` and that one's `_enumerate_iterator`, `_get_iterator`, `_num_batches` and
`_current_iterator`, and a model's `_initial_epoch`; of tf_keras its `data_handler` with `_dataset`,
`_adapter` and `_inferred_steps`, its `iterator`, and a model's `_training_state`, of which it asks
where to begin; of both its `callbacks`, and a model's `train_function`. A data adapter's
`_shuffle`, and `_inputs` and `_seed` of a shuffled `tf.data`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import tensorflow as tf

_FIT = "fit"


class Position:
    """Lets the `fit` that is about to begin its first epoch begin elsewhere.

    Made while `on_train_begin` is called.

    Args:
        model: Of either Keras.
    """

    def __init__(self, model: Any):
        self._model = model
        found = _locals_of_fit(model)
        self._keras3: Any = found.get("epoch_iterator")
        self._tf_keras: Any = found.get("data_handler")
        self._then: Callable[[Callable[[], None]], None] | None = None

    @property
    def doubts(self) -> str:
        """Why batches may come in another order in another run; `""` if nothing says so."""
        data = self._keras3 or self._tf_keras
        if data is None:
            return "`fit` is not Keras's own"
        adapter = getattr(data, "data_adapter", None) or data._adapter
        kind = type(adapter).__name__
        if kind in ("TFDatasetAdapter", "DatasetAdapter"):
            shuffled = _shuffled_without_seed(adapter._dataset)
            return "the data are shuffled without a seed" if shuffled else ""
        if kind in ("ArrayDataAdapter", "TensorLikeDataAdapter"):
            return "arrays are shuffled by `fit`" if adapter._shuffle else ""
        return f"the data come from Python ({kind})"

    def go_on(self, epoch: int, batch: int, past: int) -> None:
        """Begin with a batch of an epoch.

        Args:
            epoch: From 0; as many as there are if nothing is left.
            batch: Of this epoch, from 0.
            past: How many epochs there were before this one.

        Raises:
            ValueError: for a `fit` that is not Keras's own.
        """
        if self._keras3 is not None:
            self._model._initial_epoch = epoch
            self._then = lambda ended: self._begin_keras3(batch, past, ended)
        elif self._tf_keras is not None:
            self._model._training_state = _Counters(epoch, batch)
            self._then = lambda ended: self._begin_tf_keras(batch, past, ended)
            if self._tf_keras._adapter.should_recreate_iterator():
                for _ in range(past):
                    iter(self._tf_keras._dataset)
        else:
            raise ValueError(
                "`Checkpoint` cannot find where Keras counts epochs and batches. Received: "
                f"{type(self._model).__name__} with a `fit` of its own. Call `super().fit(...)` in "
                "it."
            )

    def epoch_begins(self, ended: Callable[[], None]) -> None:
        """Drop the batches that were seen; to be called while `on_epoch_begin` is.

        Args:
            ended: Called if it turns out later that all batches of the epoch were seen; tf_keras
                has made the model's metrics by then.
        """
        then, self._then = self._then, None
        self.reset()
        if then is not None:
            then(ended)

    def reset(self) -> None:
        """Let the next `fit` begin where it is told to."""
        if self._keras3 is not None:
            self._model._initial_epoch = None
        elif self._tf_keras is not None and isinstance(self._model._training_state, _Counters):
            self._model._training_state = None

    def _begin_keras3(self, batch: int, past: int, ended: Callable[[], None]) -> None:
        _begin_keras3(self._keras3, batch, past)
        if batch and self._keras3.num_batches is None:
            _may_have_ended(self._model, ended)

    def _begin_tf_keras(self, batch: int, past: int, ended: Callable[[], None]) -> None:
        handler, iterator = self._tf_keras, _locals_of_fit(self._model)["iterator"]
        if not handler._adapter.should_recreate_iterator():  # one for all epochs
            batch += past * handler._inferred_steps
        _drop(iterator, batch, least=batch)
        if batch and handler._inferred_steps is None:
            _may_have_ended(self._model, ended)


def _may_have_ended(model: Any, ended: Callable[[], None]) -> None:
    """Let an epoch end of which all batches were seen.

    Of data of unknown size that shows when one batch more is drawn, and `fit` wants results of a
    step all the same: callbacks of Keras 3 would be told of no metric, and tf_keras fails. It gets
    those of the metrics, and then what it takes for an end, before callbacks hear of a batch.
    """
    step, callbacks = model.train_function, _locals_of_fit(model)["callbacks"]

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
    """What tf_keras asks for where to begin."""

    def __init__(self, epoch: int, batch: int):
        self._place = epoch, batch

    def maybe_load_initial_counters_from_ckpt(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the first epoch and the first batch in it."""
        return self._place


def _locals_of_fit(model: Any) -> dict[str, Any]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if (
            frame.f_code.co_name == _FIT
            and names.get("self") is model
            and ("epoch_iterator" in names or "data_handler" in names)
        ):
            return dict(names)
        frame = frame.f_back
    return {}


def _begin_keras3(epoch_iterator: Any, batch: int, past: int) -> None:
    """Let the next epoch of an iterator begin with a batch, as if `past` epochs were over."""
    enumerate_epoch = epoch_iterator._enumerate_iterator
    at_once = epoch_iterator.steps_per_execution

    def rest() -> Iterator[Any]:
        del epoch_iterator._enumerate_iterator  # for this epoch only
        for _ in range(past):
            _pass_epoch(epoch_iterator, enumerate_epoch)
        left = False
        for begin, end, iterator in enumerate_epoch():
            if begin < batch:  # the last execution of an epoch may have had fewer steps
                _drop(iterator, at_once, least=1 if begin + at_once >= batch else at_once)
            else:
                left = True
                yield begin, end, iterator
        if not left:
            raise _too_few()

    if batch or past:
        epoch_iterator._enumerate_iterator = rest


def _pass_epoch(epoch_iterator: Any, enumerate_epoch: Callable[[], Iterator[Any]]) -> None:
    """Do what an epoch does to the data, besides drawing from iterators of its own."""
    one_for_all = epoch_iterator.steps_per_epoch is not None
    if not one_for_all and epoch_iterator._num_batches is None:  # it would go on for ever
        iter(epoch_iterator._get_iterator())
        return
    for _, _, iterator in enumerate_epoch():
        if one_for_all:
            try:
                for _ in range(epoch_iterator.steps_per_execution):
                    next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                epoch_iterator._current_iterator = None
                return


def _drop(iterator: Any, batches: int, least: int) -> None:
    """Draw batches; an error if there are not even so many."""
    for drawn in range(batches):
        try:
            next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            if drawn < least:
                raise _too_few() from error
            return


def _too_few() -> ValueError:
    return ValueError(
        "the data have fewer batches than training has seen of this epoch. `Checkpoint` needs the "
        "same data and batch size as in the run that was saved, or a directory of its own."
    )


def _shuffled_without_seed(dataset: Any) -> bool:
    """Whether a `tf.data.Dataset` holds a shuffle whose order is drawn anew in every run."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if "Shuffle" in type(dataset).__name__ and all(s is not None and not int(s) for s in seeds):
        return True
    return any(_shuffled_without_seed(inner) for inner in dataset._inputs())
