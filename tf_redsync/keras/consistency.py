"""Comparison of optimizers, losses, metrics, weights and learning rates between workers.

Workers compare configs as text when an optimizer is built and when `fit` and its epochs begin.
`step/drift.py` compares weights during training, and `compare_seals` after the last step.

Name of Keras used here: `_fn_kwargs` of its losses and metrics.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.building import libraries
from tf_redsync.cluster import agreement
from tf_redsync.keras import models, momentum, statistics
from tf_redsync.keras.slots import all_variables
from tf_redsync.network import strategies
from tf_redsync.step.drift import DriftDetector, Shared
from tf_redsync.step.streaming import Streaming

# A name contains a counter of the worker's earlier objects, and the id is an address.
_NOT_COMPARED = ("name", "shared_object_id")
_OF_COMPILE = ("loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly")
_compiled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by model


def describe(inner: Any, saving: ModuleType | None) -> dict[str, Any]:
    """Return an inner optimizer's config, the package versions and the mode of execution.

    Args:
        inner: The optimizer.
        saving: The `saving` module of the optimizer's family; `None` uses `get_config`.
    """
    config = None
    with momentum.without_rate_function(inner) as rate:
        # Some optimizers cannot be saved, and a user's class may read the function.
        with contextlib.suppress(AttributeError, TypeError, ValueError, NotImplementedError):
            config = inner.get_config() if saving is None else saving.serialize_keras_object(inner)
    if config is None:
        config = momentum.config_of(inner)
    family = "keras" if saving is None else saving.__name__.partition(".")[0]
    packages = ("tensorflow", family, "tf_redsync")
    versions = {p: getattr(importlib.import_module(p), "__version__", "") for p in packages}
    versions["tf_redsync"] += f" with sources {libraries.digest_of_package()[:8]}"
    described = {
        "versions": versions,
        "optimizer": _plain({type(inner).__name__: config}),
        **_execution(),
    }
    return described if rate is None else described | {"learning_rate": _described(rate)}


def _execution() -> dict[str, Any]:
    """Return whether functions run eagerly: collectives then have other keys, and deadlock."""
    return {"tf.config.functions_run_eagerly": tf.config.functions_run_eagerly()}


def _plain(value: Any) -> Any:
    """Return a config as JSON-serializable values, without keys that may differ."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _NOT_COMPARED}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (tf.Tensor, tf.Variable, np.ndarray, np.generic)):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__name__)


def note_compile(model: Any, arguments: Mapping[str, Any]) -> None:
    """Record the arguments of a model's `compile` for `compare_compile`, as JSON values.

    Args:
        model: The model.
        arguments: By name, without defaults.
    """
    _compiled[model] = {n: _described(arguments[n]) for n in _OF_COMPILE if n in arguments}


def compare_compile(model: Any) -> None:
    """Check that all workers have compiled a model with the same loss, metrics and execution.

    Different losses would not deadlock: the workers would train on the sum of their gradients.

    Args:
        model: A model, compiled or not. All workers must call it at the same point.

    Raises:
        Disagreement: on all workers.
    """
    action = {"compile": _compiled.get(model, "not compiled"), **_execution()}
    agreement.agree(model.distribute_strategy, json.dumps(action))


def _described(value: Any) -> Any:
    """Return an argument as JSON: objects by class and config, functions by name and source."""
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":  # its bytecode, with the path of the script
            return "lambda"
        return {str(k): _described(v) for k, v in value.items() if k not in _NOT_COMPARED}
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    if isinstance(value, FunctionType):
        return f"{value.__qualname__}{_source_digest(value)}"
    if hasattr(value, "get_config") and not isinstance(value, type):
        try:
            config = _described(value.get_config())
        except Exception:  # of a user's class that cannot be saved
            config = {}
        # Keras's losses leave their arguments out of the config.
        return {type(value).__name__: config | _described(getattr(value, "_fn_kwargs", {}))}
    return _plain(value)


def _source_digest(function: FunctionType) -> str:
    """Return a digest of a function's source, such as " (source 01abcdef)", or ""."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return f" (source {hashlib.sha256(source.encode()).hexdigest()[:8]})"


def drift_of(
    exchange: Any,
    inner: Any,
    variables: Sequence[tf.Variable],
    rate: Callable[[], Any],
    every: int,
    on_drift: str,
) -> DriftDetector | None:
    """Return the drift detector of an optimizer's weights, or `None`.

    The result is `None` with one worker, with methods without an exchange, and if collectives
    cannot run in branches. They cannot with `direct_collectives=False`, or if each replica of a
    process is a worker.

    Args:
        exchange: A built `GradientExchange`.
        inner: The optimizer.
        variables: The trainable variables, by position.
        rate: Returns the learning rate.
        every: Number of steps between comparisons; 0 for none.
        on_drift: See `DriftDetector`.
    """
    strategy, network = tf.distribute.get_strategy(), exchange.network
    # Without an exchange, weights differ by design.
    exchanges = all(b.method.traits.exchanges for b in exchange.schedule.buckets)
    if not every or network.workers == 1 or not network.in_branches or not exchanges:
        return None
    local, skips_locally = strategy.experimental_local_results, exchange.schedule.skips_locally
    names, consensus = [s.name for s in exchange.specs], exchange.consensus
    if consensus is None:
        trainable = [Shared(n, local(v)) for n, v in zip(names, variables, strict=True)]
    else:
        pairs = zip(names, consensus.agreed, consensus.own, strict=True)
        trainable = [Shared(n, pair) for n, *pair in pairs]

    @functools.cache  # a step that only one worker traces again must compare the same variables
    def weights() -> list[Shared]:
        averaged = strategies.is_redsync_strategy(strategy) and not skips_locally
        used = strategy.used_statistics if averaged else []
        return trainable + [_statistic(local, v) for v in used if statistics.is_shared(v)]

    def numbers() -> dict[str, tf.Tensor]:
        if skips_locally:  # iterations, and thus scheduled learning rates, may differ in a round
            return {}
        return {"learning rate": rate(), "iterations": tf.convert_to_tensor(inner.iterations)}

    def all_slots() -> list[Shared]:
        slots = [] if skips_locally else all_variables(inner)
        # A thread beside the steps may be writing to those of streaming methods.
        beside = isinstance(exchange.schedule, Streaming)
        states = [] if beside else [v for state in exchange.states for v in state.shared()]
        return [Shared(v.name, local(v)) for v in (*slots, *states) if v.dtype.is_floating]

    return DriftDetector(exchange, every, on_drift, numbers, weights, all_slots)


def _statistic(local: Callable[[Any], Sequence[tf.Variable]], variable: Any) -> Shared:
    # Until another optimizer's local steps average it in rounds.
    applies = functools.partial(statistics.is_shared, variable)
    return Shared(variable.name, local(variable), applies=applies)


def seals_of(model: Any) -> list[tuple[DriftDetector, list[int]]]:
    """Return the drift detectors of a model, with the fingerprints of this worker's weights."""
    exchanges = [e for e in models.exchanges_of(model) if e.built and e.called]
    return [(e.drift, e.drift.seals().numpy().tolist()) for e in exchanges if e.drift is not None]


def compare_seals(model: Any, seals: list[tuple[DriftDetector, list[int]]]) -> None:
    """Compare fingerprints of the workers' weights, without a collective.

    Args:
        model: The model.
        seals: The result of `seals_of`. All workers must call it at the same point.

    Raises:
        Drifted: on all workers, if the weights differ.
    """
    strategy = model.distribute_strategy
    for detector, words in seals:
        text = json.dumps(words)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if len(set(agreement.gather_texts(strategy, "compare the weights", digest))) > 1:
            texts = agreement.gather_texts(strategy, "name the weights that differ", text)
            detector.report_last([json.loads(t) for t in texts])


def compare_rate(model: Any, when: str) -> None:
    """Compare the learning rates of all workers, which must call it at the same point.

    Args:
        model: A model; a no-op unless its optimizer is wrapped.
        when: The time of the comparison, as text for the message.

    Raises:
        Disagreement: on all workers, if the rates differ.
    """
    exchange = getattr(getattr(model, "optimizer", None), "exchange", None)
    if exchange is None or not exchange.built:
        return
    strategy = model.distribute_strategy
    if exchange.schedule.skips_locally:
        # A schedule, or a callback, may count each worker's own steps.
        skipped = str(int(exchange.skipped.numpy()))
        if {"0"} != set(agreement.gather_texts(strategy, "count skipped steps", skipped)):
            return
    rate = np.asarray(tf.convert_to_tensor(exchange.rate()))
    agreement.agree(strategy, json.dumps({f"learning rate when {when}": str(rate)}))
