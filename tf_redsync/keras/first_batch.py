"""Keras's look at the first batch, without the other workers.

Before Keras 3 traces a step it builds model, metrics and loss from the shapes and dtypes of a
batch, and gets one for all replicas by `strategy.reduce("MEAN", batch, axis=None)`. Most of what a
batch may hold has no mean (strings, bools, ragged and sparse tensors), workers may have different
numbers of rows, and the numbers are not used. So each worker takes its first replica's.

Keras calls the model on that batch, which it does under a strategy alone. A model with a
`train_step` and without `call`, as Keras's examples of a VAE and a GAN, cannot be called; its step
builds the remaining layers, as it does without a strategy.

Under TensorFlow's own strategy on several workers this look is what ends `fit` and `evaluate`, with
an error of Keras that names neither. With a wrapped optimizer it is an error that does.

Names of Keras used here, besides those of `KerasTensor`: `_maybe_symbolic_build(iterator,
data_batch)` and `_distribute_strategy` of a model.
"""

from __future__ import annotations

import functools
from typing import Any

from tf_redsync.keras import generators, model_exchanges
from tf_redsync.network import collectives

_NAME = "_maybe_symbolic_build"


def install(model_class: Any) -> None:
    """Let models under our strategy look at their own first batch; a second call does nothing.

    Args:
        model_class: `keras.Model`.
    """
    owner = next((c for c in model_class.__mro__ if _NAME in vars(c)), None)
    build = vars(owner)[_NAME] if owner else None
    if build is None or hasattr(build, "__wrapped__"):  # another backend, or a second call
        return

    @functools.wraps(build)
    def alone(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = self._distribute_strategy
        if not hasattr(strategy, "reduces_locally"):
            if iterator is not None and strategy is not None:  # of `fit` or `evaluate`
                _check_strategy(self, strategy)
            return build(self, iterator, data_batch)
        if collectives.worker_count(strategy) > 1:
            strategy.first_digest = generators.first_digest(iterator)
        if type(self).call is model_class.call:
            _build_optimizer(self, strategy)
            return None
        strategy.reduces_locally = True
        try:
            with generators.first_look(iterator):
                return build(self, iterator, data_batch)
        finally:
            strategy.reduces_locally = False

    setattr(owner, _NAME, alone)


def _check_strategy(model: Any, strategy: Any) -> None:
    """Refuse Keras's loops with a wrapped optimizer where they do not work.

    Raises:
        ValueError: under TensorFlow's own strategy on several workers.
    """
    workers = collectives.worker_count(strategy)
    if workers > 1 and model_exchanges.exchanges_of(model):
        raise ValueError(
            "Keras 3's `fit` and `evaluate` need tf_redsync.MultiWorkerMirroredStrategy on several "
            f"workers. Received: strategy={type(strategy).__module__.partition('.')[0]}'s "
            f"{type(strategy).__name__} with {workers} workers. Make and compile the model in the "
            "scope of `strategy = tf_redsync.MultiWorkerMirroredStrategy()`; loops of your own "
            "work under both."
        )


def _build_optimizer(model: Any, strategy: Any) -> None:
    """Build the optimizer of a model whose layers are built; the first step builds any other."""
    optimizer = model.optimizer
    variables = model.trainable_variables
    if optimizer is None or optimizer.built or not variables:
        return
    if all(layer.built for layer in model.layers):
        with strategy.scope():
            optimizer.build(variables)
