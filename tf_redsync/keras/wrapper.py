"""The base of all wrappers: forwards attributes, builds, saves, and switches compression.

A wrapper is an optimizer of its family and inherits attributes such as `weight_decay` and
`clipnorm` that have no effect. They are removed from the instance, so that Python calls
`__getattr__`, which forwards to the inner optimizer.

Assignments are forwarded, too, or raise an error. Variables such as the learning rate may change at
any time. Other hyper-parameters are constants of the traced step or determine the variables, so
they may change only before the optimizer is built.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, summary
from tf_redsync.auto import Auto
from tf_redsync.config import from_config, imported_only, serialize
from tf_redsync.exchange.method import Method
from tf_redsync.explanation import Explanation
from tf_redsync.keras import (
    accuracy,
    compile_hook,
    conflicts,
    exchange_state,
    fit_hook,
    weight_sync,
)
from tf_redsync.keras.adapter import Adapter
from tf_redsync.keras.slots import Access
from tf_redsync.policy import Policy
from tf_redsync.step.builder import ExchangeBuilder
from tf_redsync.step.gradient_exchange import GradientExchange

_NOT_FORWARDED = ("name", "built")  # attributes of the wrapper itself, not forwarded
_READ_ONLY = ("exchange", "inner_optimizer")
_CONFIG = (
    "name inner_optimizer method warm_up bucket_bytes direct_collectives two_levels "
    "max_skipped_steps check_every on_drift"
).split()  # keys of the wrapper's config
_PLAIN = (bool, int, float, str, type(None))


class Inner:
    """Descriptor that forwards an attribute of the family's base class to the inner optimizer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        inner = vars(wrapper).get("inner_optimizer")  # also read by the base class's constructor
        return None if inner is None else getattr(inner, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        if "inner_optimizer" in vars(wrapper):  # otherwise within the base class's constructor
            wrapper.forward_attribute(self._name, value)


class AttributeForwarding:
    """Base of `Wrapper` that forwards attributes to the inner optimizer."""

    inner_optimizer: Any
    exchange: Any
    _adapter: Any

    def delete_forwarded(self) -> None:
        """Delete inherited attributes that the inner optimizer has, too, to forward them."""
        for name in [n for n in vars(self) if not n.startswith("_") and n not in _NOT_FORWARDED]:
            if name not in _READ_ONLY and hasattr(self.inner_optimizer, name):
                del self.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        if "inner_optimizer" in self.__dict__ and not name.startswith("_"):
            owner = self._owner(name)
            if owner is not None:
                return getattr(owner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = "inner_optimizer" in self.__dict__
        if wrapped and name in _READ_ONLY and name in self.__dict__:
            raise AttributeError(
                f"`{name}` of a DistributedOptimizer cannot be set. Wrap a new optimizer."
            )
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not wrapped or is_own or self._owner(name) is None:
            super().__setattr__(name, value)
        else:
            self.forward_attribute(name, value)

    def set_on_wrapper(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapper itself, also one that is read-only for users."""
        super().__setattr__(name, value)

    def forward_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the inner optimizer.

        Raises:
            AttributeError: the inner optimizer has no such attribute.
            ValueError: the value would have no effect, or does not suit the method.
        """
        owner = self._owner(name)
        if owner is None:
            raise AttributeError(
                f"{type(self.inner_optimizer).__name__!r} has no attribute {name!r}"
            )
        old = getattr(owner, name)
        self.refuse(name, value)
        if hasattr(old, "assign") and not callable(value):
            setattr(owner, name, value)  # a variable, which the next step reads
        elif not (isinstance(old, _PLAIN) and isinstance(value, _PLAIN) and old == value):
            self.refuse_if_built(name, value)
            setattr(owner, name, value)
            try:
                self._adapter.check_inner()
            except ValueError:
                setattr(owner, name, old)
                raise

    def refuse_if_built(self, name: str, value: Any) -> None:
        """Reject a value that would have no effect on existing variables and traced steps.

        Raises:
            ValueError: after `build`.
        """
        if not self.exchange.built:
            return
        if name == "learning_rate" and not callable(value):
            raise ValueError(
                "`learning_rate` cannot be set: the optimizer has a schedule, which sets it in "
                f"every step. Received: learning_rate={value!r}. Create the optimizer with a "
                "number to set the rate later, also by ReduceLROnPlateau."
            )
        raise ValueError(
            f"`{name}` cannot be set after the optimizer is built: traced steps have its value as "
            f"a constant. Received: {name}={value!r}. Set it before the first step, or compile "
            "the model with a new optimizer."
        )

    def refuse(self, name: str, value: Any) -> None:
        """Reject a value that is never supported.

        Raises:
            ValueError: for XLA, a second loss scale, a second momentum or gradient accumulation.
        """
        innermost = conflicts.innermost(self.inner_optimizer)
        conflicts.check_momentum_value(innermost, self._adapter.policy, name, value)
        if name == "gradient_accumulation_steps" and value != getattr(self, name):
            raise conflicts.late_accumulation(value)
        if name == "jit_compile" and value:
            raise ValueError(
                "`jit_compile=True` is not supported: the update shares a function with "
                f"collectives. Received: jit_compile={value!r}"
            )
        if (
            name == "loss_scale_factor"
            and value is not None
            and innermost is not self.inner_optimizer
        ):
            raise ValueError(
                "`loss_scale_factor` would scale the loss twice: the wrapper has a "
                f"LossScaleOptimizer inside. Received: loss_scale_factor={value!r}"
            )

    def _owner(self, name: str) -> Any:
        """Return the innermost optimizer that has an attribute, or `None`."""
        inner = self.inner_optimizer
        candidates = (conflicts.innermost(inner), inner)
        return next((o for o in candidates if hasattr(o, name)), None)


class Wrapper(AttributeForwarding):
    """Base of the wrappers, which precedes the family's base class.

    Hyper-parameters of the inner optimizer can be read and set on the wrapper.

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
        """Set the wrapped optimizer and its options; return the adapter."""
        options = {name: checks.to_python(value) for name, value in options.items()}
        self._options = options
        self._adapter = Adapter(inner_optimizer, method, self.saving, access, **options)
        self.exchange = self._adapter.exchange
        self.inner_optimizer = inner_optimizer
        self.delete_forwarded()
        state = self.exchange_state_class(lambda: self.exchange, lambda: self.iterations)
        self.set_on_wrapper(exchange_state.ATTRIBUTE, state)
        return self._adapter

    def rewrap(self, inner_optimizer: Any) -> None:
        """Replace the wrapped optimizer by one that contains it."""
        self._adapter.rewrap(inner_optimizer)
        self.set_on_wrapper("inner_optimizer", inner_optimizer)

    def build_exchange(
        self, variables: Sequence[Any], sparse_totals: Callable[[Method], bool] | None = None
    ) -> None:
        """Build the exchange of the inner optimizer's variables; see `ExchangeBuilder.build`.

        A snapshot that was loaded before is restored.
        """
        self._adapter.build(variables, sparse_totals)
        builder = self.exchange
        if builder is not self._adapter.exchange:
            self.set_on_wrapper("exchange", self._adapter.exchange)
            for text in accuracy.of_exchange(self.inner_optimizer, self.exchange):
                warnings.warn(text, accuracy.AccuracyWarning, stacklevel=2)
            if builder.loaded is not None:
                getattr(self, exchange_state.ATTRIBUTE).restore(lambda: builder.loaded)

    def build_if_needed(self, variables: Sequence[Any]) -> None:
        """Build with the variables of the first step, unless `build` was called before."""
        if variables and not self.exchange.built:
            outside_of_replicas(lambda: self.build(variables))

    @property
    def method(self) -> Method | Policy | Auto:
        """The `method` argument; `Auto()` by default."""
        policy = self._adapter.policy
        only = isinstance(policy, Policy) and policy == Policy(default=policy.default)
        return policy.default if only else policy

    @method.setter
    def method(self, value: Any) -> None:
        raise AttributeError(
            "`method` of a DistributedOptimizer cannot be set, because residuals belong to a "
            f"method. Received: method={value!r}. Pass it to a new DistributedOptimizer around a "
            "new optimizer."
        )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Exclude variables from the inner optimizer's weight decay; see Keras.

        Raises:
            ValueError: after `build`, when it has no effect.
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
        self.forward_attribute("learning_rate", value)

    lr = learning_rate  # alias of tf_keras and legacy optimizers

    @property
    def iterations(self) -> Any:
        """The inner optimizer's step counter."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self.inner_optimizer.iterations = value

    def explain(self) -> Explanation:
        """Return a table of every variable's exchange, with warnings about accuracy.

        Raises:
            RuntimeError: before `build`.
        """
        made = self.exchange.explain()
        largest = sorted(self.exchange.assignments, key=lambda a: -a.spec.size)
        hints = accuracy.of_settings(self.inner_optimizer, [a.method for a in largest])
        hints += accuracy.of_exchange(self.inner_optimizer, self.exchange)
        return dataclasses.replace(made, hints=hints)

    def summary(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print a table of every variable's exchange, like Keras's `model.summary()`.

        The columns are the method, its density, the bytes that this worker sends per step, the
        compression ratio, the selection, and the state in bytes.

        Args:
            print_fn: Called with each line; `print` by default.

        Raises:
            RuntimeError: before `build`.
        """
        summary.write(self.exchange, self.name, print_fn)

    def bytes_per_step(self) -> float:
        """Return the mean bytes that this worker sends per step, after warm-ups.

        Raises:
            RuntimeError: before `build`.
        """
        return self.exchange.bytes_per_step()

    def prune(self, sparsity: float, scope: str = "layer") -> None:
        """Set the smallest weights of the variables that `PacTrain` exchanges to 0 permanently.

        Their optimizer slots are set to 0, too. Call it between two steps, in the strategy's scope,
        on all workers; `tf_redsync.callbacks.Prune` calls it in `fit`. Zero weights are pruned
        first, so a pruned model does not change.

        Args:
            sparsity: Fraction of the weights to prune, in (0, 1).
            scope: `"layer"` prunes the fraction of each variable, `"model"` of all variables
                together.

        Raises:
            RuntimeError: before `build`.
            ValueError: an argument is out of range, weights are non-finite, or `PacTrain` exchanges
                no variable.
            Disagreement: workers do not prune the same weights at the same step.
        """
        self._adapter.prune(sparsity, scope)

    def flush(self) -> None:
        """Deliver the workers' residuals at the end of training, and empty them.

        It runs one more step of the inner optimizer on the sums of all residuals. The step counts
        for the learning rate's schedule, weight decay and the optimizer's momentum. With local
        steps, residuals are weight changes and are added to the weights. Velocities are not
        delivered, as in dense training; the momentum of `CodedGMC` is, as a part of its residual.
        With gradient accumulation the step counts as a window, and the sums of an unfinished window
        stay. Variables of frozen layers of Keras 3 stay, with their residuals.

        Call it between two steps on all workers; `tf_redsync.callbacks.Flush` calls it at the end
        of `fit`.

        Raises:
            RuntimeError: before `build`.
            ValueError: a method exchanges momenta.
            Disagreement: workers do not flush at the same step.
        """
        self._adapter.flush(self.apply_gradients)

    def disable(self) -> None:
        """Disable compression from the next step on; steps are those of a dense warm-up.

        Gradients (`CodedAdam`: updates) are all-reduced in float32, with the method's momentum if
        it has one. Residuals are kept until `enable()`; call `flush()` before to deliver them.
        `CodedGMC` holds its momentum in the residual, so its first dense step delivers both at
        once, as `flush()` would.
        Methods with a delay (`CDSGD`) are flushed automatically. Per-worker weights are
        synchronized.

        Call it between two steps, such as in a callback, on all workers. `fit` retraces its step. A
        custom loop needs a new `tf.function`; the old one raises an error. The setting is not
        saved: a resumed training compresses.

        Raises:
            RuntimeError: before `build`.
            Disagreement: workers do not call it at the same step.
        """
        self._switch("disable")

    def enable(self) -> None:
        """Enable compression from the next step on, after `disable()`.

        Raises:
            RuntimeError: before `build`.
            Disagreement: workers do not call it at the same step.
        """
        self._switch("enable")

    def _switch(self, action: str) -> None:
        off, schedule = action == "disable", self.exchange.schedule
        if off == schedule.off:
            return
        if off and schedule.delay and int(self.exchange.step.numpy()):
            self.flush()
        self.exchange.switch(off)
        fit_hook.trace_again(self.exchange)

    def get_config(self) -> dict[str, Any]:
        """Return the config: name, inner optimizer, method and options."""
        warm_up = self._options.get("warm_up")
        return {
            "name": self.name,
            "inner_optimizer": self.saving.serialize_keras_object(self.inner_optimizer),
            "method": serialize(self._adapter.policy),
            **self._options,
            "warm_up": None if warm_up is None else serialize(warm_up),
        }

    @classmethod
    def saving_of(cls, inner_config: Any) -> ModuleType:
        """Return the module `saving` of the library that loads an inner optimizer's config."""
        return cls.saving

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Wrapper:
        """Return a new optimizer from the result of `get_config`.

        Raises:
            ValueError: the config is incomplete, or has unknown keys.
        """
        config = copy.deepcopy(config)  # some optimizers modify their config
        missing = [key for key in ("inner_optimizer", "method") if key not in config]
        if missing:
            raise ValueError(
                f"the config of a DistributedOptimizer must have {' and '.join(missing)!r}. "
                f"Received: config with {sorted(config)}"
            )
        unknown = sorted(set(config) - set(_CONFIG))
        if unknown:
            raise ValueError(
                f"the config of a DistributedOptimizer has unknown keys: {unknown}. Set arguments "
                'of the inner optimizer in config["inner_optimizer"]["config"]. A config with '
                f"other keys is of another version of tf_redsync. Known keys: {_CONFIG}"
            )

        saving = cls.saving_of(config["inner_optimizer"])

        def registered(name: str) -> Any:
            return saving.get_registered_object(name, custom_objects=custom_objects)

        inner_config = imported_only(config.pop("inner_optimizer"), registered)
        inner = cls.inner_from_config(inner_config, custom_objects)
        method = from_config(config.pop("method"), registered)
        if config.get("warm_up") is not None:
            config["warm_up"] = from_config(config["warm_up"])
        return cls(inner, method, **config)  # type: ignore[call-arg]


def outside_of_replicas(function: Callable[[], None]) -> None:
    """Call `function` eagerly, in the scope of the calling replica's strategy.

    The replicas of a process run or are traced one after the other. The first replica's call ends
    before the next replica checks whether a call is needed.
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
    """Patch the model and callback classes of a Keras library, once.

    Args:
        library: `keras` or `tf_keras`.
    """
    fit_hook.install(library.callbacks)
    fit_hook.watch_ends(library.Model)
    compile_hook.install(library.Model)
    weight_sync.install(library.Model)
