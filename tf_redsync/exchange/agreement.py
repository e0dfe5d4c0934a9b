"""Workers that disagree get an error message and not a deadlock.

They compare texts through the coordination service, without a collective.
"""

from __future__ import annotations

import itertools
import logging
import time

import tensorflow as tf

from tf_redsync.exchange import collectives

_logger = logging.getLogger("tf_redsync")
_WAIT_SLICE_SECONDS = 20
_sequence = itertools.count()


class Disagreement(ValueError):
    """Workers were started with different models or configurations."""


def agree(
    strategy: tf.distribute.Strategy, what: str, timeout_seconds: float | None = None
) -> None:
    """Compare `what` with every other worker, without a collective.

    Every call is numbered, the same on all workers, so a worker that does *something else* than
    the others at this point is found as well. The chief compares and publishes the verdict, hence
    either all workers return or all raise.

    Args:
        strategy: A multi-worker strategy; with one worker nothing happens.
        what: A text that describes what this worker is about to do.
        timeout_seconds: Give up waiting for a worker after this time. `None` waits as long as the
            worker is alive, with a warning now and then.

    Raises:
        Disagreement: on every worker, with the differing texts, when they are not all equal.
    """
    workers = collectives.worker_count(strategy)
    if workers < 2:
        return
    number, rank = next(_sequence), collectives.worker_rank(strategy)
    prefix = f"tf_redsync/agree/{number}"
    runtime = collectives.key_value_store()
    if rank != 0:
        runtime.set_config_key_value(f"{prefix}/{rank}", what)
        verdict = _wait_for(f"{prefix}/verdict", 0, what, timeout_seconds)
    else:
        texts = {r: _wait_for(f"{prefix}/{r}", r, what, timeout_seconds) for r in range(1, workers)}
        verdict = _verdict(what, texts)
        runtime.set_config_key_value(f"{prefix}/verdict", verdict)
    if verdict != "agreed":
        raise Disagreement(verdict)


def _verdict(chief: str, texts: dict[int, str]) -> str:
    different = {rank: text for rank, text in texts.items() if text != chief}
    if not different:
        return "agreed"
    lines = [f"worker 0: {chief}"] + [f"worker {r}: {text}" for r, text in different.items()]
    return (
        "the workers disagree; start all of them with the same script, flags, model and method:\n"
        + "\n".join(lines)
    )


def _wait_for(key: str, rank: int, what: str, timeout_seconds: float | None) -> str:
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        left = _WAIT_SLICE_SECONDS if timeout_seconds is None else timeout_seconds - waited
        if left <= 0:
            raise TimeoutError(
                f"worker {rank} did not get to this point within {timeout_seconds:.0f} s. This "
                f"worker is about to: {what}. Look at the log of worker {rank}."
            )
        slice_ms = int(1000 * min(left, _WAIT_SLICE_SECONDS)) or 1
        try:
            return collectives.key_value_store().get_config_key_value(key, slice_ms)
        except tf.errors.DeadlineExceededError:
            _logger.warning("waiting for worker %d since %.0f s", rank, time.monotonic() - started)
