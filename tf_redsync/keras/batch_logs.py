"""Logs of Keras 3's `fit` with local steps: their means over the workers, once per round.

Keras averages the logs of each batch by a collective, so each local step would wait for the other
workers. With local steps, a batch therefore returns the last means of the float scalars. They are
equal on all workers, so callbacks that decide on them agree. The first batch of an epoch and the
end of a round average.

Private name of Keras used here: `_get_metrics_result_or_logs(logs)`, which returns the logs of an
epoch: the metrics, or `logs` of the last batch if a custom `train_step` returns other names.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.keras import fit_hook
from tf_redsync.network import collectives
from tf_redsync.patching import patch_once

_MARK = "averaged_by_tf_redsync"


def install(model_class: Any) -> None:
    """Average the last batch's logs at the end of an epoch; a second call is a no-op.

    Args:
        model_class: `keras.Model`.
    """

    def averaging(epoch_logs: Any) -> Any:
        def averaged(self: Any, logs: Any) -> Any:
            result = epoch_logs(self, logs)
            held = getattr(self.distribute_strategy, "batch_logs", None)
            if held is None or result is not logs or fit_hook.running_method() != "fit":
                return result
            return held.latest(self, logs)

        return averaged

    patch_once(model_class, "_get_metrics_result_or_logs", averaging)


def trained_by(step: Any) -> Any:
    """Return the model of a `train_step` of Keras 3; `None` for another function."""
    name = getattr(step, "__name__", None)
    return getattr(step, "__self__", None) if name == "train_step" else None


def is_mean(value: Any, reduce_op: Any) -> bool:
    """Return whether `reduce_op` would leave a log unchanged, since it is a mean already."""
    operation = str(getattr(reduce_op, "name", reduce_op)).upper()
    # An attribute that a distributed variable lacks would reduce its value.
    return operation == "MEAN" and isinstance(value, tf.Tensor) and hasattr(value, _MARK)


class BatchLogs:
    """The float scalars in the logs of models that train with local steps under a strategy."""

    def __init__(self) -> None:
        # By model and names of its logs, of which a model may have several.
        self._by_model: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], _Held]]
        self._by_model = weakref.WeakKeyDictionary()

    def averaged(self, model: Any, logs: Any, due: tf.Tensor, network: Any) -> Any:
        """Return the logs of a train step with means over the workers, which may be older ones.

        Args:
            model: The model.
            logs: The result of its `train_step`.
            due: Whether to average now, a bool scalar that is equal on all workers.
            network: Sums over the workers.
        """
        if not isinstance(logs, dict):
            return logs
        names = tuple(sorted(n for n, v in logs.items() if _is_scalar(v)))
        if not names:
            return logs
        by_names = self._by_model.setdefault(model, {})
        if names not in by_names:
            by_names[names] = _Held(names)
        held = by_names[names]
        own = tf.stack([tf.cast(logs[name], tf.float64) for name in names])
        means = tf.unstack(held.averaged(own, due, network))
        averages = {n: tf.cast(m, logs[n].dtype) for n, m in zip(names, means, strict=True)}
        for average in averages.values():
            setattr(average, _MARK, True)
        return {**logs, **averages}

    def begin_epoch(self, model: Any) -> None:
        """Discard the means of the last epoch."""
        for held in self._by_model.get(model, {}).values():
            held.known.assign(False)

    def latest(self, model: Any, logs: Any) -> Any:
        """Return the logs of the last batch, averaged now. All workers must call it."""
        names = set(logs) if isinstance(logs, dict) else set()
        known = [h for h in self._by_model.get(model, {}).values() if h.known.numpy()]
        matching = [h for h in known if names.issuperset(h.names)]
        held = max(matching, key=lambda h: len(h.names), default=None)
        if held is None:
            return logs
        text = json.dumps(held.own.numpy().tolist())
        strategy = model.distribute_strategy
        texts = agreement.gather_texts(strategy, "average the logs of an epoch", text)
        means = np.mean([json.loads(text) for text in texts], axis=0)
        return {**logs, **dict(zip(held.names, map(float, means), strict=True))}


class _Held:
    """This worker's values of the last batch and the last means, float64 `[names]`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = tf.zeros([len(names)], tf.float64)
            self.own, self._means = (
                collectives.OneDeviceVariable(zeros, trainable=False) for _ in range(2)
            )
            self.known = collectives.OneDeviceVariable(False, trainable=False)

    def averaged(self, own: tf.Tensor, due: tf.Tensor, network: Any) -> tf.Tensor:
        """Return the means of `own` over the workers, computed now if `due` or if unknown."""
        self.own.assign(own, read_value=False)

        def average() -> tf.Tensor:
            (total,) = network.all_reduce([own])
            means = total / network.workers
            self._means.assign(means, read_value=False)
            self.known.assign(True, read_value=False)
            return means

        due |= tf.logical_not(self.known.read_value())
        return tf.cond(due, average, self._means.read_value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating and value.shape.rank == 0
