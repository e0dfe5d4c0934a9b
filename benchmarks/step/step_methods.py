"""Methods by name, and their optimizers, where the steps of a real training are measured.

All are at their defaults, with the density of the command line if it gives one, and with
the model's optimizer inside, mostly `keras.optimizers.SGD(LEARNING_RATE)`, except for what
`benchmarks/method_settings.py` lists.
Workers take expressions in the place of names too, as `benchmarks/method_expressions.py` does.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import method_expressions, method_settings
from benchmarks.models import LEARNING_RATE

MOMENTUM = 0.9
LONGEST_PERIOD = 250  # steps; what is rarer is not measured

# Names that are not those of classes, or that set a class in another way than its defaults.
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
}
PLAIN = ("dense", "dense_momentum")  # without this library
# What these classes would be is above. `dense` in lower case is TensorFlow's.
ALIASES = {"Dense": "rs_dense", "NoExchange": "none", "RedSync": "redsync"}


def names() -> list[str]:
    """All names in the order of the tables: the special ones, then the other classes."""
    import tf_redsync as rs

    classes = [entry.name for entry in rs.methods.table().entries]
    return [*SPECIAL, *(name for name in classes if name not in ALIASES)]


def parse(text: str) -> list[str]:
    """Returns the methods of a list separated by commas, `all` for all of them.

    Classes may be written in lower case; expressions such as `DiLoCo(steps=50)` stay as they are.

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
    if set(chosen) - {*SPECIAL, *expressions}:  # TensorFlow is imported only to look them up
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
    """The parts of a list, whose parts may be calls with commas of their own."""
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
        name: One of `names()`, but not of `PLAIN`, which are no methods of this library.
        density: For methods that have it; `None` for their own defaults.
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
    if name == "auto":
        return rs.Auto(**given)
    return method_settings.for_steps(name, density)


def _barrier() -> Any:
    """What any synchronous exchange takes: a worker goes on when the last one has its gradients."""
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
    """Returns the optimizer to measure; inside the strategy's scope.

    Args:
        name: The method's, or an expression.
        density: See `method_for`.
        bucket_bytes: Of the exchange; `None` for its default.
        inner: The model's optimizer, for methods that do not need another one. AdamW has no
            `beta_1`, as the methods want it that delay gradients; a step takes as long with it.
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
    kind = kinds[inner if setting.inner == "SGD" else setting.inner]
    wrapped = kind(setting.learning_rate or LEARNING_RATE)
    options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    if "(" in name:
        what = method_expressions.exchanged(name)
        method = method_settings.once_begun(what.method)
        return rs.DistributedOptimizer(wrapped, method, **{**options, **what.options})
    return rs.DistributedOptimizer(wrapped, method_for(name, density), **options)


def make_ready(optimizer: Any) -> None:
    """Prunes where a method waits for that. In the strategy's scope, after the build."""
    schedule = optimizer.exchange.schedule if hasattr(optimizer, "exchange") else None
    waiting = (
        [b.method for b in schedule.buckets if b.method.sync_schedule.waits_for] if schedule else []
    )
    if waiting:
        optimizer.prune(waiting[0].sparsity)


def period_of(optimizer: Any) -> int:
    """After how many steps a method does the same again: only one in so many may exchange all.

    1 where these are more than `LONGEST_PERIOD`: all steps but the first one are alike then.
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
    """How many steps to leave out at least: until what is tried in training is decided."""
    from tf_redsync.step.trial import Trial

    schedule = optimizer.exchange.schedule if hasattr(optimizer, "exchange") else None
    return schedule.measured + 6 if isinstance(schedule, Trial) else 0
