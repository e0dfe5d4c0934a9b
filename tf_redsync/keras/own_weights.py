"""Weights of each worker's own are brought together before Keras reads or writes them.

With local steps and with points of each worker's own, the model's variables differ from worker to
worker between two exchanges. The `FitHook` calls `bring_together`
where epochs end and where evaluations and predictions begin, and so do the model's methods that
save.

Names of Keras used here, all public: the methods `SAVING` of `Model`.
"""

from __future__ import annotations

import weakref
from typing import Any

from tf_redsync.keras import backups, replacing
from tf_redsync.keras.slots import tf_variable

SAVING = ("save", "save_weights", "export")
# Exchanges with a consensus, in the order in which they were built, the same on all workers.
_exchanges: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()


def register(exchange: Any) -> None:
    """Remember an exchange, a built one, if each worker has weights of its own with it."""
    if exchange.consensus is not None:
        _exchanges[exchange] = None


def bring_together(model: Any) -> None:
    """Make a model's weights those that all workers agree on; all of them must call it.

    Does nothing for a model that no exchange with weights of each worker's own trains.
    """
    if not _exchanges:
        return
    weights = [tf_variable(v) for v in model.weights]
    for exchange in list(_exchanges):
        own = {id(v) for v in exchange.consensus.own}
        if any(id(copy) in own for v in weights for copy in getattr(v, "values", (v,))):
            exchange.to_consensus()


def check_together(exchange: Any) -> None:
    """Check that the weights of the model are the same on all workers.

    Raises:
        ValueError: while they are each worker's own.
    """
    if exchange.built and exchange.apart:
        raise ValueError(
            "the model's weights are each worker's own now, since its method exchanges them only "
            "now and then. Call `optimizer.exchange.to_consensus()` on all workers before saving, "
            "or save by `model.save(path)`, which does."
        )


def install(model_class: type) -> None:
    """Let a family's models save what all workers agree on; a second call does nothing.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """
    for name in SAVING:
        replacing.once(model_class, name, _after_bringing_together)


def _after_bringing_together(method: Any) -> Any:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        bring_together(self)
        backups.compare(self, args[0] if args else kwargs.get("filepath"), method.__name__)
        return method(self, *args, **kwargs)

    return save
