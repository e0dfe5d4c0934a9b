"""Methods by name, and their optimizers, for measuring steps of a real training.

All are at their defaults, with the density of the command line if given, and with the model's
optimizer inside, mostly `keras.optimizers.SGD(LEARNING_RATE)`. `benchmarks/method_settings.py`
lists the exceptions. Workers also accept expressions, as in `benchmarks/method_expressions.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import method_expressions, method_settings
from benchmarks.models import LEARNING_RATE

MOMENTUM = 0.9
LONGEST_PERIOD = 250  # steps; longer periods are not measured

# Names that are no classes, or that select other settings than a class's defaults.
SPECIAL = {
    "none": "`rs.NoExchange()`: nothing is sent",
    "barrier": "`none` with an all-gather of one word a bucket: workers wait for each other",
    "dense": "TensorFlow's own strategy and the plain optimizer, so that it owes nothing to us",
    "none_momentum": f"`none` with `SGD(momentum={MOMENTUM})`, as methods with momentum have it",
    "dense_momentum": f"`dense` with `SGD(momentum={MOMENTUM})`",
    "rs_dense": "`rs.Dense()`: the same all-reduce through this library",
    "redsync": f"`rs.RedSync(momentum={MOMENTUM})`",
    "redsync_m0": "`rs.RedSync()`, without momentum",
    "auto": "`rs.Auto()`: the library chooses, before the steps that are measured",
    "auto_momentum": f"`auto` with `SGD(momentum={MOMENTUM})`, which may move to the exchange",
}
PLAIN = ("dense", "dense_momentum")  # without this library
# Names above replace these classes. `dense` in lower case is TensorFlow's.
ALIASES = {"Dense": "rs_dense", "NoExchange": "none", "RedSync": "redsync"}


def names() -> list[str]:
    """All names in the order of the tables: the special ones, then the other classes."""
    import tf_redsync as rs

    classes = [entry.name for entry in rs.methods.table().entries]
    return [*SPECIAL, *(name for name in classes if name not in ALIASES)]


def parse(text: str) -> list[str]:
    """Returns the methods of a list separated by commas, or all for `all`.

    Classes may be written in lower case; expressions such as `DiLoCo(steps=50)` are unchanged.

    Raises:
        ValueError: for an unknown or repeated name.
    """
    if text.strip() == "all":
        return names()
    words = [word.strip() for word in _between_commas(text) if word.strip()]
    chosen = [word if word in SPECIAL else ALIASES.get(word, word) for word in words]
    expressions = [word for word in chosen if "(" in word]
    for word in expressions:
        method_expressions.exchanged(word)
    if set(chosen) - {*SPECIAL, *expressions}:  # avoids importing TensorFlow for known names
        spelling = {name.lower(): name for name in names()}
        spelling |= {name.lower(): ALIASES[name] for name in ALIASES if name != "Dense"}
        spelling |= {word.lower(): word for word in expressions}
        unknown = [word for word in chosen if word.lower() not in spelling]
        if unknown:
            raise ValueError(
                f"`--methods` must be all, or of {', '.join(names())}, separated by commas. "
                f"Received: --methods={text} with the unknown {', '.join(unknown)}"
            )
        chosen = [spelling[word.lower()] for word in chosen]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`--methods` must be different names, such as {', '.join(SPECIAL)}, separated by "
            f"commas. Received: --methods={text}"
        )
    return chosen


def _between_commas(text: str) -> list[str]:
    """The parts of a list; parts may be calls that contain commas."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def method_for(name: str, density: float | None) -> Any:
    """Returns the method called `name`.

    Args:
        name: One of `names()`, except those of `PLAIN`, which do not use this library.
        density: For methods with a density; `None` for their defaults.
    """
    import tf_redsync as rs

    if name in ("none", "none_momentum"):
        return rs.NoExchange()
    if name == "barrier":
        return _barrier()
    if name == "rs_dense":
        return rs.Dense()
    given = {} if density is None else {"density": density}
    if name in ("redsync", "redsync_m0"):
        return rs.RedSync(momentum=MOMENTUM if name == "redsync" else 0.0, **given)
    if name in ("auto", "auto_momentum"):
        return rs.Auto(**given)
    return method_settings.for_steps(name, density)


def _barrier() -> Any:
    """Lower bound for synchronous exchanges: a worker waits until all have their gradients."""
    import tensorflow as tf

    import tf_redsync as rs
    from tf_redsync.exchange.requests import AllGather

    class Barrier(rs.NoExchange):
        def exchange(self, grads, state, ctx):
            with tf.control_dependencies(grads):
                message = tf.ones([1], tf.int32)
            yield AllGather(message)
            return list(grads), state

    return Barrier()


def strategy_for(name: str) -> Any:
    """Returns the strategy: TensorFlow's own for `PLAIN`."""
    import tensorflow as tf

    if name in PLAIN:
        return tf.distribute.MultiWorkerMirroredStrategy()
    import tf_redsync as rs

    return rs.MultiWorkerMirroredStrategy()


def optimizer_for(
    name: str, density: float | None, bucket_bytes: int | None = None, inner: str = "SGD"
) -> Any:
    """Returns the optimizer to measure; call it in the strategy's scope.

    Args:
        name: The method's name, or an expression.
        density: See `method_for`.
        bucket_bytes: Of the exchange; `None` for its default.
        inner: The model's optimizer, for methods that do not need another one. AdamW has `beta_1`
            0, which methods with delayed gradients require; a step takes as long with it.
    """
    import keras

    kinds = {
        "SGD": keras.optimizers.SGD,
        "Adam": keras.optimizers.Adam,
        "AdamW": functools.partial(keras.optimizers.AdamW, beta_1=0.0),
    }
    if name.endswith("_momentum"):
        kinds["SGD"] = functools.partial(keras.optimizers.SGD, momentum=MOMENTUM)
    if name in PLAIN:
        return kinds[inner](LEARNING_RATE)
    import tf_redsync as rs

    kinds["AMSGrad"] = rs.AMSGrad
    setting = method_settings.setting_of(name.partition("(")[0])
    kind = kinds[setting.inner or inner]
    wrapped = kind(setting.learning_rate or LEARNING_RATE)
    options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    if "(" in name:
        what = method_expressions.exchanged(name)
        method = method_settings.once_begun(what.method)
        return rs.DistributedOptimizer(wrapped, method, **{**options, **what.options})
    return rs.DistributedOptimizer(wrapped, method_for(name, density), **options)


def make_ready(optimizer: Any) -> None:
    """Prunes if a method waits for that; call it in the strategy's scope, after the build."""
    schedule = optimizer.exchange.schedule if hasattr(optimizer, "exchange") else None
    waiting = (
        [b.method for b in schedule.buckets if b.method.sync_schedule.waits_for] if schedule else []
    )
    if waiting:
        optimizer.prune(waiting[0].sparsity)


def period_of(optimizer: Any) -> int:
    """Returns the number of steps after which a method repeats its exchanges.

    Returns 1 if that exceeds `LONGEST_PERIOD`: then all steps but the first one are alike.
    """
    from tf_redsync.step.local_steps import LocalSteps

    if not hasattr(optimizer, "exchange"):
        return 1
    schedule = optimizer.exchange.schedule
    local = schedule.steps if isinstance(schedule, LocalSteps) else 1
    dense = [b.method.sync_schedule.dense_every for b in schedule.buckets]
    period = max(1, local, *dense)
    return period if period <= LONGEST_PERIOD else 1


def trial_steps(optimizer: Any) -> int:
    """Returns the minimum number of steps to omit: until a trial is decided."""
    from tf_redsync.step.trial import Trial

    schedule = optimizer.exchange.schedule if hasattr(optimizer, "exchange") else None
    return schedule.measured + 6 if isinstance(schedule, Trial) else 0
