"""What a wrapper passes on to the optimizer inside it; the same for all three families."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync import summary
from tf_redsync.auto import Auto
from tf_redsync.config import from_config, serialize
from tf_redsync.exchange.method import Method
from tf_redsync.explanation import Explanation
from tf_redsync.keras import (
    accuracy,
    conflicts,
    exchange_state,
    fit_hook,
    loss_scaling,
    own_weights,
)
from tf_redsync.keras.adapter import Adapter
from tf_redsync.keras.delegation import PassingOn
from tf_redsync.keras.slots import Access
from tf_redsync.policy import Policy
from tf_redsync.step.builder import ExchangeBuilder
from tf_redsync.step.gradient_exchange import GradientExchange


class Wrapper(PassingOn):
    """Base of the wrappers, before the family's own base class.

    Hyper-parameters of the inner optimizer can be read and set here; see `passing.py`.

    Attributes:
        inner_optimizer: The wrapped optimizer. Learning rate and iterations are its own.
        exchange: The `GradientExchange`, with counters `step`, `skipped`, `bytes_sent`; before
            `build` an `ExchangeBuilder`.
    """

    saving: ClassVar[ModuleType]  # the family's `saving` module
    inner_from_config: Callable[..., Any]
    exchange_state_class: ClassVar[type[exchange_state.ExchangeState]]  # of the family

    name: str
    inner_optimizer: Any
    exchange: GradientExchange | ExchangeBuilder
    _adapter: Adapter
    build: Callable[[Sequence[Any]], None]
    apply_gradients: Callable[..., Any]

    def wrap(
        self,
        inner_optimizer: Any,
        method: Any,
        options: dict[str, Any],
        access: Access | None = None,
    ) -> Adapter:
        """Keep what this wraps, and return the adapter for it."""
        if isinstance(options.get("warm_up"), dict):  # of a config
            options = {**options, "warm_up": from_config(options["warm_up"])}
        self._options = dict(options)
        self._adapter = Adapter(inner_optimizer, method, self.saving, access, **options)
        self.exchange = self._adapter.exchange
        self.inner_optimizer = inner_optimizer
        self.forget_own()
        state = self.exchange_state_class(lambda: self.exchange, lambda: self.iterations)
        self.set_own(exchange_state.ATTRIBUTE, state)
        return self._adapter

    def rewrap(self, inner_optimizer: Any) -> None:
        """Wrap an optimizer in place of the one inside of it."""
        self._adapter.rewrap(inner_optimizer)
        self.set_own("inner_optimizer", inner_optimizer)

    def build_exchange(self, variables: Sequence[Any], sparse_totals: bool = False) -> None:
        """Make the exchange of the inner optimizer's variables, if that is not done."""
        self._adapter.build(variables, sparse_totals)
        if self.exchange is not self._adapter.exchange:
            self.set_own("exchange", self._adapter.exchange)

    def build_once(self, variables: Sequence[Any]) -> None:
        """Build with the variables of the first step, unless `build` was called before it."""
        if variables and not self.exchange.built:
            outside_of_replicas(lambda: self.build(variables))

    @property
    def method(self) -> Method | Policy | Auto:
        """What was given for `method`: how gradients are exchanged. `Auto()` if nothing was."""
        policy = self._adapter.policy
        only = isinstance(policy, Policy) and policy == Policy(default=policy.default)
        return policy.default if only else policy

    @method.setter
    def method(self, value: Any) -> None:
        raise AttributeError(
            "`method` of a DistributedOptimizer cannot be changed: the residuals are its own. "
            f"Received: method={value!r}. Give it to a new DistributedOptimizer around a new "
            "optimizer."
        )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Exclude variables from the inner optimizer's weight decay; see Keras.

        Raises:
            ValueError: after `build`, when it would have no effect.
        """
        self.refuse_if_built("exclude_from_weight_decay", var_names or var_list)
        innermost = conflicts.innermost(self.inner_optimizer)
        innermost.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.pass_on("learning_rate", value)

    lr = learning_rate  # as tf_keras and legacy optimizers also call it

    @property
    def iterations(self) -> Any:
        """The inner optimizer's step counter."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self.inner_optimizer.iterations = value

    def explain(self) -> Explanation:
        """Return a table of what happens to every variable, and what is known to cost accuracy."""
        made = self.exchange.explain()
        largest = sorted(self.exchange.assignments, key=lambda a: -a.spec.size)
        hints = accuracy.of_settings(self.inner_optimizer, [a.method for a in largest])
        return dataclasses.replace(made, hints=hints)

    def summary(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print how every variable is exchanged, beside Keras's `model.summary()`.

        For each variable the method, its density, the bytes that this worker sends of it in a step,
        the ratio of a dense all-reduce's to these, the selection, and the bytes of its state.

        Args:
            print_fn: Called with each line; `print` if it is `None`.

        Raises:
            RuntimeError: before `build`.
        """
        summary.write(self.exchange, self.name, print_fn)

    def bytes_per_step(self) -> float:
        """Bytes this worker sends in a step; see `GradientExchange.bytes_per_step`."""
        return self.exchange.bytes_per_step()

    def prune(self, sparsity: float, scope: str = "layer") -> None:
        """Set the smallest weights of the variables that `PacTrain` exchanges to 0, for good.

        The optimizer's slots are cleared there. Between two steps, in the strategy's scope, and on
        all workers; `tf_redsync.callbacks.Prune` does it in `fit`. Weights that are 0 already are
        the first to be pruned, so a model that comes pruned stays as it is.

        Args:
            sparsity: Fraction of the weights that is pruned, in (0, 1).
            scope: `"layer"`: of each variable; `"model"`: of all of them together.

        Raises:
            RuntimeError: before `build`.
            ValueError: for bad arguments, weights that are not finite, or where no variable is
                exchanged by `PacTrain`.
            Disagreement: where workers do not prune the same weights at the same step.
        """
        self._adapter.prune(sparsity, scope)

    def flush(self) -> None:
        """Deliver at the end of training what still waits in the workers' residuals.

        One more step of the inner optimizer, whose gradients are the sums of all residuals, over
        the variables whose method keeps one; these are empty then. It counts as a step for the
        learning rate's schedule, weight decay and the optimizer's own momentum. With local steps,
        where changes of the weights wait, they are added to the weights. Velocities stay: dense
        training does not apply its own at its end either.

        Between two steps and on all workers; `tf_redsync.callbacks.Flush` does it where `fit` ends.

        Raises:
            RuntimeError: before `build`.
            Disagreement: where workers do not flush at the same step.
        """
        self._adapter.flush(self.apply_gradients)

    def disable(self) -> None:
        """Exchange densely from the next step on: the inner optimizer, and a plain all-reduce.

        Steps are those of a dense warm-up: float32 sums, with the momentum of the method if it has
        one. Residuals stay where they are, until `enable()`; `flush()` before it delivers them.
        With a delay (`CDSGD`) it is done here. Weights of each worker's own are brought together.

        Between two steps, in a callback for example, and on all workers. `fit` traces its step
        again; a loop of your own needs a new `tf.function`, and says so if it has none. It is not
        saved: a program that goes on from a checkpoint compresses.

        Raises:
            RuntimeError: before `build`.
            Disagreement: where workers do not do so at the same step.
        """
        self._switch("disable")

    def enable(self) -> None:
        """Compress again from the next step on, after `disable()`.

        Raises:
            RuntimeError: before `build`.
            Disagreement: where workers do not do so at the same step.
        """
        self._switch("enable")

    def _switch(self, what: str) -> None:
        if isinstance(self.exchange, ExchangeBuilder):
            raise RuntimeError(
                f"`{what}` needs the model's variables: call `optimizer.build(variables)` first."
            )
        if what == "disable" and self.exchange.schedule.delay and self.exchange.called:
            self.flush()
        self.exchange.switch(off=what == "disable")
        fit_hook.trace_again(self.exchange)

    def get_config(self) -> dict[str, Any]:
        """Return the config: inner optimizer, policy, options."""
        warm_up = self._options.get("warm_up")
        return {
            "name": self.name,
            "inner_optimizer": self.saving.serialize_keras_object(self.inner_optimizer),
            "method": serialize(self._adapter.policy),
            **self._options,
            "warm_up": None if warm_up is None else serialize(warm_up),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Wrapper:
        """Rebuild the optimizer from `get_config`'s result.

        Raises:
            ValueError: for a config that is not complete.
        """
        config = copy.deepcopy(config)  # some optimizers take theirs apart
        missing = [key for key in ("inner_optimizer", "method") if key not in config]
        if missing:
            raise ValueError(
                f"the config of a DistributedOptimizer must have {' and '.join(missing)!r}. "
                f"Received: config with {sorted(config)}"
            )
        inner = cls.inner_from_config(config.pop("inner_optimizer"), custom_objects)
        method = from_config(
            config.pop("method"),
            lambda name: cls.saving.get_registered_object(name, custom_objects=custom_objects),
        )
        return cls(inner, method, **config)  # type: ignore[call-arg]


def outside_of_replicas(function: Callable[[], None]) -> None:
    """Call `function` eagerly, in the scope of the strategy of the calling replica.

    The replicas of a process run, or are traced, one after the other, so that the first one's call
    is over when the next one asks whether it is needed.
    """
    with tf.init_scope():
        if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
            function()
            return
    strategy = tf.distribute.get_strategy()
    errors: list[BaseException] = []

    def in_scope() -> None:
        try:
            with strategy.scope():
                function()
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=in_scope, name="tf_redsync_build")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def install(library: Any) -> None:
    """Let tf_redsync take part in a library's models: methods of their classes are replaced, once.

    Args:
        library: `keras` or `tf_keras`.
    """
    fit_hook.install(library.callbacks)
    fit_hook.watch_ends(library.Model)
    loss_scaling.install(library.Model)
    own_weights.install(library.Model)
