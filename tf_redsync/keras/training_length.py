"""The length of a training: settings that are fractions of it, and warnings if it is short.

Keras passes the number of epochs and of steps per epoch to callbacks in `params`, which is public,
and the first epoch to `on_epoch_begin`.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from tf_redsync.cluster import agreement
from tf_redsync.exchange.capabilities import dense_start
from tf_redsync.exchange.method import Method
from tf_redsync.keras import accuracy, fit_resume, models
from tf_redsync.keras.conflicts import innermost as innermost_optimizer
from tf_redsync.methods.common.wrapper import innermost
from tf_redsync.policy import Assignment
from tf_redsync.schedules import ExponentialWarmUp
from tf_redsync.step.fit_steps import WarmUp

_FRACTION = "DistributedOptimizer(..., warm_up=DenseWarmUp(fraction=0.05))"


def ahead(model: Any, exchange: Any, params: Mapping[str, Any], epoch: int) -> tuple[int, float]:
    """Return the number of remaining epochs and of updates per epoch; 0 if unknown.

    The number assumes that a `train_step` applies the optimizer once.

    Args:
        model: The model that is trained.
        exchange: The exchange of one of its optimizers.
        params: The `params` of a callback.
        epoch: The epoch that begins, from 0.
    """
    wrappers = (o for o in models.optimizers_of(model) if getattr(o, "exchange", None) is exchange)
    inner = innermost_optimizer(next(wrappers, None))  # none for the parts of a `MultiOptimizer`
    every = getattr(inner, "gradient_accumulation_steps", None) or 1
    steps, own_steps = params.get("steps") or 0, fit_resume.steps_of_own_shard(model)
    if own_steps is not None:
        steps = min(steps, own_steps)
    return (params.get("epochs") or 0) - epoch, steps / every


def begin(model: Any, exchange: Any, params: Mapping[str, Any], epoch: int) -> None:
    """Set the numbers of steps that are fractions of the training, equal on all workers.

    Args:
        model: The model that is trained.
        exchange: Its optimizer's exchange, which may not be built.
        params: The `params` of a callback.
        epoch: Epoch that begins, from 0.

    Raises:
        ValueError: on all workers, if one does not know its number of steps.
        Disagreement: on all workers, if they do not begin at the same point.
    """
    unknown = [length for length in exchange.lengths if not length.steps]
    if not unknown:
        return
    epochs, steps = ahead(model, exchange, params, epoch)
    own_length = str(int(epochs * steps))
    texts = agreement.gather_texts(
        model.distribute_strategy, "begin a training of this length", own_length
    )
    lengths = [int(text) for text in texts]
    if min(lengths) <= 0:
        ranks = ", ".join(str(rank) for rank, length in enumerate(lengths) if length <= 0)
        settings = " and ".join(length.setting for length in unknown)
        raise ValueError(
            f"{settings} is a fraction of the steps of `fit`, whose number is unknown on worker "
            f"{ranks}. Received: steps={params.get('steps')} and epochs={params.get('epochs')} of "
            "`fit`. Pass steps_per_epoch to `fit`, or a number of steps instead of the fraction."
        )
    for length in unknown:
        # With data of different lengths, the shortest data end the epoch.
        length.begin(length.steps_so_far + min(lengths), model.distribute_strategy)


def warn(exchange: Any, so_far: int, epochs: int, steps: float) -> None:
    """Warn about elements that are never sent, and stages that never begin.

    Args:
        exchange: The built exchange, or its `_LoopRecord`.
        so_far: Number of updates before this training.
        epochs: Number of epochs.
        steps: Updates per epoch.
    """
    waiting = accuracy.of_length(exchange, so_far, epochs, steps)
    if waiting is not None:
        warnings.warn(waiting, accuracy.AccuracyWarning, stacklevel=3)
    late = never_begins(exchange, so_far + int(epochs * steps))
    if late is not None:
        warnings.warn(late, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class _LoopRecord:
    """Attributes of an exchange that `warn_of_loops` reads, without a reference to its state."""

    workers: int
    assignments: list[Assignment]
    warm_up: WarmUp | None
    step: Any


_watched: dict[int, _LoopRecord] = {}  # by the exchange's `id`, in the order of `watch`
_MOST_WATCHED = 8


def watch(exchange: Any) -> None:
    """Register an exchange for a check of its steps when the process ends.

    The length of a custom loop is known only at that time. `forget` cancels the check when the
    length is known or the residuals are delivered.

    Args:
        exchange: The built exchange.
    """
    if exchange.workers == 1:
        return
    if not _watched:
        atexit.unregister(warn_of_loops)
        atexit.register(warn_of_loops)
    record = _LoopRecord(exchange.workers, exchange.assignments, exchange.warm_up, exchange.step)
    _watched[id(exchange)] = record
    if len(_watched) > _MOST_WATCHED:
        del _watched[next(iter(_watched))]


def forget(exchange: Any) -> None:
    """Unregister an exchange from `watch`."""
    _watched.pop(id(exchange), None)


def warn_of_loops() -> None:
    """Warn about custom loops that were too short, unless an error ended them."""
    watched = list(_watched.values())
    _watched.clear()
    if getattr(sys, "last_value", None) is not None:
        return
    for record in watched:
        total = int(record.step.numpy())
        if total:
            warn(record, 0, 1, total)


def never_begins(exchange: Any, total: int) -> str | None:
    """Return a warning about a stage that does not begin before the training ends, or `None`.

    Args:
        exchange: The built exchange.
        total: Number of steps at the end of the training.
    """
    if exchange.workers == 1:
        return None
    first, methods = 0, dict.fromkeys(a.method for a in exchange.assignments)
    if exchange.warm_up is not None:
        first = exchange.warm_up.steps
        if first >= total:
            start = next((m for m in methods if dense_start(m) is not None), None)
            setting = exchange.warm_up.setting if start is None else f"method={start!r}"
            example = _FRACTION if start is None else _fraction_of(start)
            remedy = f"Use a fraction of the training, such as {example}"
            return _text("compression", first, total, setting, remedy)
    for method in methods:
        for stage, step, remedy in _stage_starts(method):
            if first + step >= total:
                name = f"{stage} of {type(innermost(method)).__name__}"
                return _text(name, first + step, total, f"method={method!r}", remedy)
    return None


def _stage_starts(method: Method) -> Iterator[tuple[str, int, str]]:
    """Yield the stages of a method, with their first step and a remedy for late stages."""
    schedule, ramp = method.sync_schedule, getattr(innermost(method), "warm_up", None)
    if schedule.warm_up_steps:
        remedy = f"Use warm_up=None in the method, and {_FRACTION}"
        if ramp is None:
            remedy = "Use a smaller `dense_steps`"
        yield "compression", schedule.warm_up_steps, remedy
    if isinstance(ramp, ExponentialWarmUp):
        yield "the density", ramp.stages(0.0)[-1][0], "Use a smaller `steps_per_stage`"
    if schedule.changes:
        yield "the last stage", schedule.changes[-1], "Let the stages begin earlier"
    intervals = schedule.intervals
    if intervals is not None and not intervals.of_training:
        fractions = "Use fractions of the training, as in start=0.1, double_after=0.2"
        yield "local steps", intervals.local_start, fractions
        doubled = intervals.local_start + intervals.local_double_after
        yield "rounds of more than one local step", doubled, fractions


def _fraction_of(method: Method) -> str:
    """Return the argument of a method with a dense start that makes it a fraction."""
    name = type(method).__name__
    if hasattr(method, "warm_up"):
        return f"{name}(warm_up=DenseWarmUp(fraction=0.05))"
    return f"{name}(start=0.05)"


def _text(stage: str, step: int, total: int, setting: str, remedy: str) -> str:
    verb = "begin" if stage.startswith(("local", "rounds")) else "begins"
    return (
        f"{stage} {verb} after {step:,} steps, but this training ends after {total:,}. Received: "
        f"{setting}. {remedy}, or train for longer; see docs/warm-up.md."
    )
