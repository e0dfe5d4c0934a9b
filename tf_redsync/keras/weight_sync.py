"""Synchronization of per-worker weights before Keras reads or writes them.

With local steps and per-worker points, the model's variables differ between workers from one
exchange to the next. The `FitHook` calls `synchronize` when `fit` begins, after each epoch, and
before evaluations and predictions. The model's saving methods, `load_weights` and `compile` call
it, too.

Names of Keras used here, all public: the methods `SAVING` and `load_weights` of `Model`.
"""

from __future__ import annotations

import weakref
from typing import Any

from tf_redsync.keras import backups, models
from tf_redsync.keras.slots import tf_variable
from tf_redsync.patching import patch_once

SAVING = ("save", "save_weights", "export")
# Exchanges with a consensus in the order of building, which is equal on all workers.
_exchanges: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()


def register(exchange: Any) -> None:
    """Register a built exchange if its weights differ between workers."""
    if exchange.consensus is not None:
        _exchanges[exchange] = None


def synchronize(model: Any) -> None:
    """Synchronize a model's weights; all workers must call it.

    This is a no-op unless an exchange with per-worker weights trains the model.
    """
    if not _exchanges:
        return
    for exchange in _exchanges_of(model):
        exchange.to_consensus()


def _exchanges_of(model: Any) -> list[Any]:
    """Return the registered exchanges that train any weight of a model."""
    try:
        weights = [tf_variable(v) for v in model.weights]
    except ValueError:  # a layer of tf_keras is not built
        return [e for e in models.exchanges_of(model) if e in _exchanges]
    copies = {id(copy) for v in weights for copy in getattr(v, "values", (v,))}
    return [e for e in _exchanges if any(id(v) in copies for v in e.consensus.own)]


def check_synchronized(exchange: Any) -> None:
    """Check that the weights of the model are equal on all workers.

    Raises:
        ValueError: the weights differ at present.
    """
    if exchange.built and exchange.weights_differ:
        raise ValueError(
            "the model's weights differ between workers until the next exchange. Call "
            "`optimizer.exchange.to_consensus()` on all workers before saving, or save with "
            "`model.save(path)`, which calls it."
        )


def install(model_class: type) -> None:
    """Patch saving and loading of a family's models; a second call is a no-op.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """
    for name in SAVING:
        patch_once(model_class, name, _synchronizing)
    patch_once(model_class, "load_weights", _ending_rounds)


def _ending_rounds(method: Any) -> Any:
    """Wrap `load_weights` to end the round: loaded weights would count as its changes."""

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        synchronize(self)
        return method(self, *args, **kwargs)

    return load


def _synchronizing(method: Any) -> Any:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        synchronize(self)
        backups.compare(self, args[0] if args else kwargs.get("filepath"), method.__name__)
        return method(self, *args, **kwargs)

    return save
