"""Keras 3's inspection of the first batch, without communication, and a hash of its rows.

Before Keras 3 traces a step, it builds model, metrics and loss from the shapes and dtypes of a
batch. It computes this batch with `strategy.reduce("MEAN", batch, axis=None)`, although it does not
use the values. Strings, bools, ragged and sparse tensors have no mean, and workers may have
different numbers of rows. Each worker therefore uses the batch of its first replica.

Under a strategy Keras calls the model on that batch. A model with a `train_step` and without
`call`, such as Keras's VAE and GAN examples, cannot be called; its first step builds the remaining
layers.

Under TensorFlow's own strategy on several workers the inspection fails with an obscure error. With
a wrapped optimizer the error names the strategy and the remedy.

Keras drops the iterator of the first batch, with all prefetched batches. A generator does not yield
these again, and their number differs between workers. The inspection therefore reads the batches
that Keras has buffered to determine shapes. Keras later yields these before all others.

Names of Keras used here, besides those of `KerasTensor`: `_maybe_symbolic_build(iterator,
data_batch)` and `_distribute_strategy` of a model; `data_adapter` of an epoch iterator; `generator`
and `_first_batches` of a generator's adapter, `py_dataset` of a `PyDataset`'s, `_inputs` and
`_shuffle` of the arrays', and `_dataset` of a dataset's; of tf_keras `_adapter` of a data handler.
Names of tf.data: `_inputs`, `_functions`, `_seed`, `_seed2`, `_num_shards` and `_index`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.keras import models
from tf_redsync.network import strategies
from tf_redsync.patching import patch_once

_NAME = "_maybe_symbolic_build"
_ROWS = 64  # number of rows that are compared
_NO_SEED = 87654321  # TensorFlow's global seed before `tf.random.set_seed`


def install(model_class: Any) -> None:
    """Patch the inspection to use each worker's own first batch; a second call is a no-op.

    Args:
        model_class: `keras.Model`.
    """

    def inspecting(build: Callable[..., Any]) -> Callable[..., Any]:
        def inspect(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
            strategy = self._distribute_strategy
            if not strategies.is_redsync_strategy(strategy):
                if iterator is not None and strategy is not None:  # in `fit` or `evaluate`
                    _check_strategy(self, strategy)
                return build(self, iterator, data_batch)
            if type(self).call is model_class.call:
                return _build_optimizer(self, strategy)
            with _reducing_locally(strategy), replaying_buffered(iterator):
                return build(self, iterator, data_batch)

        return inspect

    patch_once(model_class, _NAME, inspecting)


@contextmanager
def _reducing_locally(strategy: Any) -> Iterator[None]:
    """Context of an inspection, in which `strategy.reduce` takes the first replica's value."""
    strategy.reduces_locally = True
    try:
        yield
    except StopIteration:
        raise ValueError(
            "the data have no batch: they are empty, or have fewer rows than one batch and "
            "`drop_remainder=True`. Received: data without a first batch"
        ) from None
    finally:
        strategy.reduces_locally = False


def _check_strategy(model: Any, strategy: Any) -> None:
    """Check that `fit` and `evaluate` support the strategy with a wrapped optimizer.

    Raises:
        ValueError: under TensorFlow's own strategy on several workers.
    """
    workers = strategies.process_count(strategy)
    if workers > 1 and models.exchanges_of(model):
        raise ValueError(
            "Keras 3's `fit` and `evaluate` need tf_redsync.MultiWorkerMirroredStrategy on several "
            f"workers. Received: strategy={type(strategy).__module__.partition('.')[0]}'s "
            f"{type(strategy).__name__} with {workers} workers. Create and compile the model in "
            "the scope of `strategy = tf_redsync.MultiWorkerMirroredStrategy()`; custom loops work "
            "under both."
        )


def _build_optimizer(model: Any, strategy: Any) -> None:
    """Build the optimizer if all layers are built; otherwise the first step builds it."""
    optimizer = model.optimizer
    variables = model.trainable_variables
    if optimizer is None or optimizer.built or not variables:
        return
    if all(layer.built for layer in model.layers):
        with strategy.scope():
            optimizer.build(variables)


@contextmanager
def replaying_buffered(iterator: Any) -> Iterator[None]:
    """Context manager in which an epoch iterator yields buffered batches of a generator.

    Args:
        iterator: Keras's epoch iterator over data of any kind, or `None`.
    """
    adapter = getattr(iterator, "data_adapter", None)
    first = getattr(adapter, "_first_batches", None)
    if adapter is None or first is None:
        yield
        return
    generator, adapter.generator = adapter.generator, lambda: iter(first)
    try:
        yield
    finally:
        adapter.generator = generator


def first_digest(iterator: Any) -> str | None:
    """Return kind and SHA-256 hash of the first rows of a generator, a `PyDataset` or arrays.

    Args:
        iterator: Keras's epoch iterator after its `reset`, in which a `PyDataset` may shuffle; for
            other objects and `None` there is no hash.

    Returns:
        Text such as "arrays 0a1b...", with kind "generators" or "arrays"; `None` for other data.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    first = getattr(adapter, "_first_batches", None)
    if first:
        kind, batch = "generators", first[0]
    elif hasattr(adapter, "py_dataset"):
        kind, batch = "generators", adapter.py_dataset[0]
    elif hasattr(adapter, "_inputs"):
        # A `tf.SparseTensor` cannot be sliced by rows.
        listed = [a for a in tf.nest.flatten(adapter._inputs) if hasattr(a, "__getitem__")]
        kind, batch = "arrays", [a[:_ROWS] for a in listed]
    else:
        return None
    digest = hashlib.sha256()
    for part in tf.nest.flatten(batch):
        array = np.atleast_1d(np.asarray(part))[:_ROWS]
        if array.dtype != object:  # not a sparse array of SciPy
            digest.update(np.ascontiguousarray(array).tobytes())
    return f"{kind} {digest.hexdigest()}"


def data_warning(digests: Sequence[str | None], method: str) -> str | None:
    """Return a warning if generators or arrays differ between the workers, else `None`.

    Args:
        digests: Kinds and hashes of the first rows, by rank.
        method: Name of the model's method, for the text.
    """
    known = {digest for digest in digests if digest is not None}
    if None in digests or len(known) == 1:
        return None
    kind = min(known).partition(" ")[0]
    workers = len(digests)
    own_rows = (
        ""  # its results would not be in the order of the rows
        if method == "predict"
        else ", or make a dataset of per-worker data (`tf.data.Dataset.from_generator` or "
        "`from_tensor_slices`) and pass `rs.already_sharded(dataset, strategy)`"
    )
    return (
        f"the {kind} passed to `{method}` begin with different rows on the workers. "
        f"`{method}` shards every batch by rows: each worker keeps 1/{workers} of the rows of its "
        f"own {kind}, and the other rows are lost. Pass the same {kind} on all workers{own_rows}. "
        "Ignore this warning if only random augmentation differs."
    )


def shuffle_seed(iterator: Any) -> int | None:
    """Return TensorFlow's global seed if Keras shuffles arrays, -1 without one; else `None`.

    Args:
        iterator: Keras's epoch iterator, or `None`.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    if not hasattr(adapter, "_inputs") or not getattr(adapter, "_shuffle", False):
        return None
    seed = int(tf.compat.v1.get_seed(1)[0])  # with an operation seed it draws no random number
    return -1 if seed == _NO_SEED else seed


def shuffle_warning(seeds: Sequence[int | None], method: str) -> str | None:
    """Return a warning if the workers shuffle arrays in different orders, else `None`.

    Args:
        seeds: `shuffle_seed` of the workers, by rank.
        method: Name of the model's method, for the text.
    """
    if None in seeds or (len(set(seeds)) == 1 and -1 not in seeds):
        return None
    shown = ", ".join("none" if seed == -1 else str(seed) for seed in seeds[:8])
    return (
        f"`{method}` shuffles the arrays in a different order on each worker and then shards every "
        "batch by rows, so that an epoch has some rows twice and others not at all. Call "
        "`keras.utils.set_random_seed(1)` with the same number on all workers, or pass "
        f"`shuffle=False`. Received: seeds by worker: {shown}"
    )


def dataset_seeds(data: Any) -> str | None:
    """Return the seeds by which a `tf.data.Dataset` shuffles before it is sharded by rows.

    If TensorFlow shards by files, it does so before the dataset shuffles.

    Args:
        data: Keras 3's epoch iterator, tf_keras's data handler, or `None`.

    Returns:
        Text such as "(1, 5)", or "none" if a shuffle has no seed. `None` for other data, and for a
        dataset that has no shuffle, is sharded by files or is not sharded.
    """
    dataset = _dataset_of(data)
    shuffles = [d for d in with_inputs(dataset) if "Shuffle" in _kind(d) and hasattr(d, "_seed2")]
    if not shuffles or not is_sharded_by_rows(dataset):
        return None
    seeds = [(int(d._seed), int(d._seed2)) for d in shuffles]
    return "none" if (0, 0) in seeds else ", ".join(map(str, seeds))


def dataset_shards(data: Any) -> str | None:
    """Return the arguments of `shard` in a `tf.data.Dataset` that TensorFlow shards as well.

    Args:
        data: Keras 3's epoch iterator, tf_keras's data handler, or `None`.

    Returns:
        Text such as "(2, 0)"; `None` for other data, without `shard`, and for
        `AutoShardPolicy.OFF`.
    """
    dataset = _dataset_of(data)
    shards = [d for d in with_inputs(dataset) if "Shard" in _kind(d) and hasattr(d, "_num_shards")]
    if not shards or _policy(dataset) == tf.data.experimental.AutoShardPolicy.OFF:
        return None
    return ", ".join(str((int(d._num_shards), int(d._index))) for d in shards)


def shard_warning(shards: Sequence[str | None], method: str) -> str | None:
    """Return a warning if the workers' datasets are shards that TensorFlow shards again.

    Args:
        shards: `dataset_shards` of the workers, by rank.
        method: Name of the model's method, for the text.
    """
    if None in shards or len(set(shards)) == 1:  # such as a split that is equal on all workers
        return None
    return (
        f"the dataset of `{method}` is sharded twice: by `dataset.shard`, and by TensorFlow, so "
        f"that each worker reads only 1/{len(shards)} of its own shard. Leave out `dataset.shard`, "
        "or pass `rs.already_sharded(dataset, strategy)`, with batches per worker. Received: "
        f"(num_shards, index) by worker: {'; '.join(map(str, shards[:8]))}"
    )


def _dataset_of(data: Any) -> tf.data.Dataset | None:
    """Return the `tf.data.Dataset` that was passed to Keras; `None` for other data."""
    adapter = getattr(data, "data_adapter", None) or getattr(data, "_adapter", None)
    dataset = getattr(adapter, "_dataset", None)
    known = "DatasetAdapter" in _kind(adapter) and isinstance(dataset, tf.data.Dataset)
    return dataset if known else None


def _kind(value: Any) -> str:
    return type(value).__name__


def _policy(dataset: tf.data.Dataset) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def with_inputs(dataset: Any) -> list[Any]:
    """Return a dataset and all datasets that it reads, each once; of `None` nothing."""
    found: dict[int, Any] = {}
    waiting = [] if dataset is None else [dataset]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting.extend(one._inputs())
    return list(found.values())


def is_sharded_by_rows(dataset: tf.data.Dataset) -> bool:
    """Return whether TensorFlow gives each worker some rows of every batch of a dataset."""
    policies = tf.data.experimental.AutoShardPolicy
    policy = _policy(dataset)
    if policy == policies.AUTO:
        return not any(map(_reads_files, with_inputs(dataset)))
    return bool(policy == policies.DATA)


def _reads_files(dataset: Any) -> bool:
    """Return whether a dataset, or a function of it as in `interleave`, reads files of records."""
    kinds = [type(dataset).__name__]
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        kinds += [node.op for node in graph.node]
        kinds += [node.op for inner in graph.library.function for node in inner.node_def]
    return any("RecordDataset" in kind or "TextLineDataset" in kind for kind in kinds)


def dataset_warning(seeds: Sequence[str | None], method: str) -> str | None:
    """Return a warning if the workers shuffle datasets in different orders, else `None`.

    Args:
        seeds: `dataset_seeds` of the workers, by rank.
        method: Name of the model's method, for the text.
    """
    if None in seeds or (len(set(seeds)) == 1 and "none" not in seeds):
        return None
    return (
        f"the dataset of `{method}` shuffles in a different order on each worker. TensorFlow then "
        "shards every batch by rows, so that an epoch has some rows twice and others not at all. "
        "Use the same seeds on all workers: `dataset.shuffle(n, seed=1)`, or "
        "`image_dataset_from_directory(..., seed=1)`, and in `keras.utils.set_random_seed`. If the "
        "dataset has only this worker's rows, pass `rs.already_sharded(dataset, strategy)`. "
        "Received: seeds by worker: "
        f"{'; '.join(map(str, seeds[:8]))}"
    )
