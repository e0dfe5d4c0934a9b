"""Python generators and `PyDataset`s in `fit` of Keras 3.

Keras builds a model from a first batch, and then drops the iterator that it came from, with every
batch that was prefetched. A generator does not yield these again: as many are lost as it was fast
to yield, another number on each worker. So the first look gets the batches that Keras has put aside
to find out their shapes, and puts back before the others.

Names of Keras used here: `data_adapter` of an epoch iterator; `generator` and `_first_batches` of
the adapter of a generator, and `py_dataset` of that of a `PyDataset`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf


@contextmanager
def first_look(iterator: Any) -> Iterator[None]:
    """Within this context, an iterator over a generator's batches takes none from the generator.

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
    """Return a hash of the first batch of a generator or a `PyDataset`, or `None` for other data.

    Args:
        iterator: Keras's epoch iterator, or `None`.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    first = getattr(adapter, "_first_batches", None)
    if first:
        batch = first[0]
    elif hasattr(adapter, "py_dataset"):
        batch = adapter.py_dataset[0]
    else:
        return None
    found = hashlib.sha256()
    for part in tf.nest.flatten(batch):
        array = np.asarray(part)
        if array.dtype != object:  # no batch of scipy's, say
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def warning_of(digests: Sequence[str | None], method: str) -> str | None:
    """Return a warning of generators that do not yield the same batches on all workers, if so.

    Args:
        digests: Of the first batches, by rank.
        method: Of the model, for the text.
    """
    if None in digests or len(set(digests)) == 1:
        return None
    workers = len(digests)
    return (
        f"the first batches of the generators that `{method}` got differ between the workers. "
        f"`{method}` divides every batch by rows: a worker keeps 1/{workers} of the rows that its "
        "own generator yields and drops the others, which no other worker sees. Yield the same "
        "global batches on all workers, or make the generator of this worker's own data a dataset "
        "(`tf.data.Dataset.from_generator`) and pass `rs.already_sharded(dataset, strategy)`. If "
        "only random augmentation differs, nothing is lost."
    )
