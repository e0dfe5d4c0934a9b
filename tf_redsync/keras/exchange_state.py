"""The exchange's state in Keras's files, in addition to the inner optimizer's variables.

Keras saves every Keras object among an optimizer's attributes under the attribute's name: in
`.keras`, `.weights.h5` and sharded files, with Keras 3 and tf_keras. A plain optimizer has no such
attribute and ignores that group of the file.

Public names of Keras used here: `save_own_variables(store)` and `load_own_variables(store)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.keras import models
from tf_redsync.state import restore

ATTRIBUTE = "exchange_state"  # of the wrapper, and the group's name in files


class ExchangeState:
    """Object through which Keras saves and loads this worker's snapshot of the exchange.

    Args:
        exchange: Returns the exchange.
        iterations: Returns the optimizer's step counter.
    """

    def __init__(self, exchange: Callable[[], Any], iterations: Callable[[], Any]):
        super().__init__()
        # Functions, because Keras walks through the attributes of the objects that it saves.
        self._exchange, self._iterations = exchange, iterations

    def save_own_variables(self, store: Any) -> None:
        """Store the snapshot's arrays if the exchange is built."""
        exchange = self._exchange()
        snapshot = exchange.worker_state() if exchange.built else exchange.loaded or {}
        for name, array in snapshot.items():
            store[name.replace("/", ".")] = array

    def load_own_variables(self, store: Any) -> None:
        """Restore the snapshots that the workers load; all workers must call it.

        Before `build` the snapshot is kept, and `build` restores it. If Keras has not loaded the
        optimizer's variables, it has warned, and the exchange starts anew with the optimizer. A
        loaded model whose exchange is not built only predicts.
        """
        exchange = self._exchange()
        continues = int(tf.convert_to_tensor(self._iterations()))
        if exchange.built:
            self.restore(lambda: _that_continues(snapshot_in(store), continues))
        else:
            keeps = continues and not models.is_loading()
            exchange.loaded = snapshot_in(store) if keeps else None

    def restore(self, load: Callable[[], dict[str, np.ndarray]]) -> None:
        """Restore this worker's snapshot in the built exchange; all workers must call it.

        Args:
            load: Returns the snapshot; empty if the file has none.
        """
        exchange = self._exchange()
        restore.restore_or_warn(exchange, lambda: [p for p in [load()] if p])
        warn_if_fresh(exchange, self._iterations(), "the loaded file has")


def snapshot_in(store: Any) -> dict[str, np.ndarray]:
    """Return the snapshot in a Keras store or a group of an `.h5` file; empty if absent."""
    return {name.replace(".", "/"): np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118


def _that_continues(snapshot: dict[str, np.ndarray], iterations: int) -> dict[str, np.ndarray]:
    """Return the snapshot; an empty one if only the optimizer starts anew, as Keras has warned."""
    exchanges = int(np.max(snapshot.get("step", 0), initial=0))
    return snapshot if iterations or not exchanges else {}


def class_of(base: type) -> type[ExchangeState]:
    """Return the `ExchangeState` class of an optimizer family.

    Args:
        base: The family's `Loss`, the smallest base class whose objects Keras saves.
    """
    return type("ExchangeState", (ExchangeState, base), {})


def warn_if_fresh(exchange: Any, iterations: Any, source: str) -> None:
    """Warn once if the optimizer's iterations were restored but not the exchange's state.

    Args:
        exchange: The built exchange.
        iterations: The optimizer's step counter.
        source: Subject and verb of the warning, such as "the loaded file has".
    """
    begun = int(tf.convert_to_tensor(iterations))
    if not exchange.fresh or not begun or exchange.workers == 1 or int(exchange.step.numpy()):
        return
    exchange.fresh = False
    warnings.warn(
        f"the optimizer resumes at iteration {begun}, but {source} no state of the exchange: "
        "undelivered gradients are lost, and methods start from their initial state. Load a file "
        "that was saved with the DistributedOptimizer (docs/saving.md), or ignore this for weights "
        "from elsewhere.",
        stacklevel=2,
    )
