"""What Keras does around the update, in a step that is skipped: nothing, but for the counters.

The update itself is guarded by `Adapter.guarded`. Weight decay comes before the exchange, where it
is not known yet whether the step is finite, and constraints, averages and the step counter come
after it.

Private names used here, on the *instance* of the inner optimizer: `_apply_weight_decay(variables)`,
of Keras 3 and tf_keras; `_update_model_variables_moving_average(variables)` and
`_overwrite_model_variables_with_average_value(variables)`, of Keras 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class Skipping:
    """What a step must leave alone if it is skipped; one for each wrapped optimizer.

    Attributes:
        finite: Of the step that is traced, once its exchange is: bool scalar, the same everywhere.
    """

    def __init__(self) -> None:
        self.finite: Any = None
        self._applying = 0  # how many replicas are in the middle of a step
        self._decay: Callable[[], None] | None = None
        self._constrained: Sequence[Any] = ()
        self._before: list[tf.Tensor] = []

    def decay_later(self, inner: Any) -> None:
        """Let an optimizer decay weights in the update, if there is one, and not before it."""
        decay = inner._apply_weight_decay

        def remember(variables: Sequence[Any]) -> None:
            self._decay = tf.autograph.experimental.do_not_convert(lambda: decay(variables))

        inner._apply_weight_decay = remember

    def decay_now(self, strategy: tf.distribute.Strategy) -> None:
        """Decay the weights just before their update, where Keras has brought the replicas."""
        if self._decay is None:
            return
        if tf.distribute.in_cross_replica_context():
            strategy.extended.call_for_each_replica(self._decay)
        else:  # there is only one
            self._decay()

    def exchanged(self, finite: tf.Tensor) -> None:
        """Note, in a replica context, how the exchange of this step ended."""
        self.finite = finite
        self._before = [tf.convert_to_tensor(v) for v in self._constrained]

    @contextmanager
    def unconstrained(self, variables: Sequence[Any]) -> Iterator[None]:
        """Around an optimizer's `apply`: undo the constraints of `variables` if it is skipped."""
        self.finite, self._decay = None, None
        self._constrained = [v for v in variables if getattr(v, "constraint", None) is not None]
        yield
        if self.finite is None:  # there was no gradient
            return
        for variable, before in zip(self._constrained, self._before, strict=True):
            now = tf.convert_to_tensor(variable)
            variable.assign(tf.where(self.finite, now, before))

    def only_if_finite(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Wrap what runs after the exchange so that a skipped step does not run it.

        Keras calls it outside of steps as well: at the end of `fit`.
        """

        def run(*args: Any) -> None:
            def call() -> None:
                function(*args)

            if self._applying and self.finite is not None:
                tf.cond(self.finite, call, lambda: None)
            else:
                call()

        return run

    def guard_keras3(self, inner: Any) -> None:
        """Guard what an optimizer of Keras 3 does before and after its update.

        With gradient accumulation, which one worker alone may have, there is not an update in every
        step: the weights' averages and the step counter go on.
        """
        self.decay_later(inner)
        apply = inner.apply
        accumulates = getattr(inner, "gradient_accumulation_steps", None)

        def guarded(grads: Any, trainable_variables: Any = None) -> None:
            trained = trainable_variables
            if trained is None:
                trained = inner._trainable_variables
            trained = list(trained)
            self._applying += 1
            try:
                with self.unconstrained(() if accumulates else trained):
                    apply(grads, trainable_variables if trainable_variables is None else trained)
            finally:
                self._applying -= 1
            if self.finite is not None and not accumulates:
                inner.iterations.assign_sub(tf.cast(~self.finite, inner.iterations.dtype))

        inner.apply = guarded
        name = "_overwrite_model_variables_with_average_value"
        setattr(inner, name, _on_one_replica(inner, getattr(inner, name)))
        if not accumulates:
            for name in (
                "_update_model_variables_moving_average",
                "_overwrite_model_variables_with_average_value",
            ):
                setattr(inner, name, self.only_if_finite(getattr(inner, name)))


def _on_one_replica(inner: Any, overwrite: Callable[..., None]) -> Callable[..., None]:
    """Wrap Keras 3's overwriting of weights by averages so that it can be done in a branch.

    It is in one with `ema_overwrite_frequency`, and brings the replicas of all workers together,
    which is refused there. The averages are equal on all of them, so each can do it by itself.
    """

    def run(variables: Sequence[Any]) -> None:
        local = tf.distribute.get_strategy().experimental_local_results
        pairs = [
            [local(v if isinstance(v, tf.Variable) else v.value) for v in pair]
            for pair in zip(variables, inner._model_variables_moving_average, strict=True)
            if pair[1] is not None
        ]
        alone = all(len(variable) == 1 for variable, _ in pairs)
        if tf.distribute.in_cross_replica_context() or not alone:
            overwrite(variables)
            return
        for (variable,), (average,) in pairs:
            variable.assign(tf.cast(average, variable.dtype))

    return run
