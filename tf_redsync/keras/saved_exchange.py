"""The exchange's state in Keras's files, beside the inner optimizer's variables.

Keras saves every object of its own that it finds among an optimizer's attributes, under the
attribute's name: in `.keras`, `.weights.h5` and sharded files, of Keras 3 and of tf_keras. A plain
optimizer has no such attribute, so it does not look at what is there.

Names of Keras used here, all public: `save_own_variables(store)` and `load_own_variables(store)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.state import restore

ATTRIBUTE = "exchange_state"  # of the wrapper, and the group's name in files


class SavedExchange:
    """This worker's part of the exchange's state, for Keras to save and load.

    Args:
        exchange: Returns the exchange.
        iterations: Returns the optimizer's step counter.
    """

    def __init__(self, exchange: Callable[[], Any], iterations: Callable[[], Any]):
        super().__init__()
        # Functions: Keras walks through the attributes of what it saves.
        self._exchange, self._iterations = exchange, iterations

    def save_own_variables(self, store: Any) -> None:
        """Store the part, if there are variables."""
        exchange = self._exchange()
        if exchange.built:
            for name, array in exchange.worker_state().items():
                store[name.replace("/", ".")] = array

    def load_own_variables(self, store: Any) -> None:
        """Restore the state from the parts that the workers load; all of them must."""
        exchange = self._exchange()
        if not exchange.built:  # Keras says so itself, of the optimizer's variables
            return
        restore.restore_or_warn(exchange, lambda: [p for p in [part_in(store)] if p])
        warn_if_fresh(exchange, self._iterations(), "what was loaded has")


def part_in(store: Any) -> dict[str, np.ndarray]:
    """Return the part in a store of Keras, or in a group of an `.h5` file; empty without one."""
    return {name.replace(".", "/"): np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118


def class_of(base: type) -> type[SavedExchange]:
    """Return the class for a family.

    Args:
        base: The smallest class of the family whose objects Keras saves: its `Loss`.
    """
    return type("SavedExchange", (SavedExchange, base), {})


def warn_if_fresh(exchange: Any, iterations: Any, what: str) -> None:
    """Warn, once, of a training that goes on with an exchange that begins."""
    begun = int(tf.convert_to_tensor(iterations))
    if not exchange.fresh or not begun or exchange.workers == 1 or int(exchange.step.numpy()):
        return
    exchange.fresh = False
    warnings.warn(
        f"the optimizer goes on at iteration {begun}, but {what} nothing of the exchange: what had "
        "not been delivered yet is lost, and methods start anew. Load what was saved with the "
        "DistributedOptimizer (docs/saving.md); of weights that come from elsewhere it is all "
        "there is.",
        stacklevel=2,
    )
