"""Which workers see the same directory, and what it does to all if one of them cannot write."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.network import collectives
from tf_redsync.state.checkpoint_store import Store


def leaders(strategy: tf.distribute.Strategy, store: Store, what: str) -> list[int]:
    """For each worker, the first one that sees the same directory; all workers call it.

    Args:
        strategy: Whose workers they are.
        store: The directory as this worker sees it. It is made if there is none.
        what: Why, for an agreement.

    Raises:
        OSError: on all workers, if one of them cannot write there.
    """
    rank = collectives.worker_rank(strategy)
    job = agreement.gather_texts(strategy, what, uuid.uuid4().hex)[0]
    failed = failure(lambda: store.leave_token(job, rank))
    all_failed = agreement.gather_texts(strategy, f"{what}: write", failed)
    first = min([rank, *store.tokens(job)]) if not failed else rank
    found = [int(text) for text in agreement.gather_texts(strategy, f"{what}: look", str(first))]
    with contextlib.suppress(OSError):
        store.remove_token(job, rank)
    if any(all_failed):
        raise OSError(by_worker(all_failed))
    return found


def failure(action: Callable[[], Any]) -> str:
    """Do something; return why the disk did not let it, or `""`."""
    try:
        action()
    except OSError as error:
        return str(error)
    return ""


def by_worker(told: list[str]) -> str:
    """What some workers have told; once if it is the same."""
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(told) if text)
