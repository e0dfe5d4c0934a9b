"""How many steps `fit` is going to run, for a warm-up that is a fraction of them.

Keras tells callbacks in `params`, public in both, the number of epochs and of steps in each; and
`on_epoch_begin` the epoch that it begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_redsync.exchange import agreement


def ahead(params: Mapping[str, Any], epoch: int) -> tuple[int, int]:
    """Return how many epochs `fit` is going to run, and of how many steps; 0 for not known.

    Args:
        params: Of a callback.
        epoch: That begins, from 0.
    """
    return (params.get("epochs") or 0) - epoch, params.get("steps") or 0


def begin_warm_up(model: Any, exchange: Any, params: Mapping[str, Any], epoch: int) -> None:
    """Set the length of a warm-up, unless it is known; on all workers alike.

    Args:
        model: That is about to be trained.
        exchange: Its optimizer's, whether built or not.
        params: Of a callback.
        epoch: That begins, from 0.

    Raises:
        ValueError: on all workers, where one does not know its number of steps.
    """
    warm_up = exchange.warm_up
    if warm_up is None or warm_up.steps:
        return
    epochs, steps = ahead(params, epoch)
    own = str(epochs * steps)
    told = agreement.everyones(model.distribute_strategy, "begin a dense warm-up", own)
    lengths = [int(text) for text in told]
    if min(lengths) <= 0:
        ranks = ", ".join(str(rank) for rank, length in enumerate(lengths) if length <= 0)
        raise ValueError(
            "`warm_up` is a fraction of the steps that `fit` will run, and how many these are is "
            f"not known (on worker {ranks}). Received: warm_up={warm_up.asked!r}, with "
            f"steps={params.get('steps')} and epochs={params.get('epochs')} of `fit`. Use "
            "steps_per_epoch=... in `fit`, or warm_up=DenseWarmUp(steps=...)."
        )
    # Where workers have data of different lengths, the shortest ends the epoch.
    warm_up.begin(warm_up.steps_so_far + min(lengths), model.distribute_strategy)
