"""Groups the workers that see the same directory; a write error of one worker raises on all."""

from __future__ import annotations

import contextlib
import uuid

import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.network import strategies
from tf_redsync.state.checkpoint_store import Store


def leaders(strategy: tf.distribute.Strategy, store: Store, action: str) -> list[int]:
    """Return, for each worker, the lowest rank that sees the same directory.

    All workers must call it.

    Args:
        strategy: The strategy of the workers.
        store: The directory as this worker sees it; created if missing.
        action: The purpose, on which the workers must agree.

    Raises:
        OSError: On all workers, if one of them cannot write to its directory.
    """
    rank = strategies.process_rank(strategy)
    job = agreement.gather_texts(strategy, action, uuid.uuid4().hex)[0]
    failed = ""
    try:
        store.leave_token(job, rank)
    except OSError as error:
        failed = str(error)
    all_failed = agreement.gather_texts(strategy, f"{action}: write", failed)
    first = min([rank, *store.tokens(job)]) if not failed else rank
    first_ranks = [
        int(text) for text in agreement.gather_texts(strategy, f"{action}: look", str(first))
    ]
    with contextlib.suppress(OSError):
        store.remove_token(job, rank)
    if any(all_failed):
        raise OSError(by_worker(all_failed))
    return first_ranks


def by_worker(messages: list[str]) -> str:
    """Return the workers' messages as one text; a single message if all are equal."""
    if len(set(messages)) == 1:
        return messages[0]
    return "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(messages) if text)
