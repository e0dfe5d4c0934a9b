"""The number of workers, this worker's rank, and the batch size per worker, for scripts."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import warnings

from tf_redsync import environment
from tf_redsync.cluster import tf_config


@dataclasses.dataclass(frozen=True)
class World:
    """The workers of a run.

    Attributes:
        rank: Rank of this worker, as `rank()`.
        size: Number of workers, as `size()`.
        restarts: Number of restarts by the launcher, from 0. With `tf-redsync launch --nodes` it
            also counts restarts because hosts joined or left.
    """

    rank: int
    size: int
    restarts: int


def world() -> World:
    """Return this worker's rank, the number of workers, and the number of restarts.

    Needs neither a strategy nor the launcher: without TF_CONFIG it is `World(0, 1, 0)`.

    Raises:
        ValueError: for a malformed TF_CONFIG or TF_REDSYNC_RESTART.

    Example:
        >>> import tf_redsync as rs
        >>> rs.world()
        World(rank=0, size=1, restarts=0)
    """
    text = os.environ.get(environment.RESTART) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(
            f"`{environment.RESTART}` must be a number from 0, as the launcher sets it. Received: "
            f"{environment.RESTART}={text!r}"
        )
    return World(tf_config.rank(), tf_config.size(), int(text))


def per_worker_batch(global_batch: int) -> int:
    """Return the examples per worker and step that keep a global batch.

    It is for datasets that yield this worker's batches, such as those of `already_sharded`.
    `fit` divides the batches of other datasets itself: batch those by `global_batch`. With R GPUs
    per worker, batch by `per_worker_batch(global_batch) // R`, because every GPU takes a batch.

    Args:
        global_batch: Examples of all workers in a step. If it is not divisible by the number of
            workers, the nearest multiple is used, and a warning names it.

    Raises:
        ValueError: `global_batch` is not an integer, or there is less than one example per worker.

    Example:
        >>> import tf_redsync as rs
        >>> rs.per_worker_batch(256)  # on one worker
        256
    """
    workers = tf_config.size()
    if isinstance(global_batch, bool) or not isinstance(global_batch, numbers.Integral):
        raise ValueError(f"`global_batch` must be an integer. Received: {global_batch!r}")
    if global_batch < workers:
        raise ValueError(
            f"`global_batch` must be at least the number of workers, {workers}. Received: "
            f"global_batch={global_batch}"
        )
    global_batch = int(global_batch)
    batch = (2 * global_batch + workers) // (2 * workers)
    if batch * workers != global_batch:
        _warn(global_batch, batch, workers)
    return batch


@functools.cache
def _warn(global_batch: int, batch: int, workers: int) -> None:
    """Warn once of a global batch that is not divisible by the number of workers."""
    warnings.warn(
        f"{workers} workers do not divide global_batch={global_batch}: with {batch} examples each, "
        f"the global batch is {batch * workers}",
        stacklevel=3,
    )
