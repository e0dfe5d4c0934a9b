"""`DistributedOptimizer`, the wrapper for optimizers of Keras 3, tf_keras and legacy tf_keras."""

from __future__ import annotations

import abc
import copy
import importlib
from types import ModuleType
from typing import Any

import keras
from typing_extensions import override

from tf_redsync import checks, requirements
from tf_redsync.auto import Auto
from tf_redsync.exchange.method import Method
from tf_redsync.keras.wrapper import Wrapper
from tf_redsync.policy import Policy
from tf_redsync.schedules import DenseWarmUp
from tf_redsync.step.drift import CHOICES as DRIFT_CHOICES
from tf_redsync.step.drift import DEFAULT_EVERY
from tf_redsync.step.nonfinite import DEFAULT_LIMIT


class DistributedOptimizer(Wrapper, abc.ABC):
    """An optimizer whose gradients are exchanged by a compressed method.

    The method's exchange replaces the all-reduce of gradients. Everything else (learning rate,
    weight decay, clipping, EMA, slots) remains with the inner optimizer. Optimizers of Keras 3 clip
    each worker's gradient before the exchange, those of tf_keras and TensorFlow Addons the
    exchanged gradient.

    If any worker has a non-finite value in a step, all workers skip the step. A skipped step only
    increments `optimizer.exchange.skipped`, which `fit` logs for each epoch as `skipped_steps`.
    After ten skipped steps in a row, a warning names the worker and the variable.

    The constructor returns an optimizer of the inner optimizer's family, for `model.compile` or a
    custom loop. The object is also an instance of this class. Its additional members are
    `exchange`, `explain()`, `summary()`, `bytes_per_step()`, `disable()`, `enable()`, `flush()` and
    `prune()`. Unless `build(variables)` was called, the first step builds the exchange for the
    variables of that step.

    Args:
        optimizer: A Keras 3, tf_keras or legacy (TensorFlow Addons) optimizer. Alternatively a name
            such as `"adam"` or a config, as in `keras.optimizers.get`. With TF_USE_LEGACY_KERAS=1,
            `tf_keras.optimizers.get` creates the optimizer.
        method: The method of the exchange: `RedSync(...)`, `Dense(...)`, a `Policy` that chooses by
            variable, or `Auto(...)`, which chooses by measurement. `None`: `Auto()`.
        warm_up: `DenseWarmUp(steps=...)`, or `DenseWarmUp(fraction=...)` of the steps that `fit`
            will run. All gradients are all-reduced densely during the warm-up, and the method
            begins after it. `None`: only the method's own warm-up, if any. See docs/warm-up.md.
        name: Name of the wrapper.
        bucket_bytes: Size at which a bucket is full, in float32 bytes. Tensors of one method are
            exchanged together in buckets. `None`: 16 MiB, but at most a quarter of these tensors;
            not below 1 MiB. `RedSync` and `ZeroOneAdam` restore a saved state only with the same
            value.
        direct_collectives: Use single-round collectives where the strategy has them; `False`
            forces TensorFlow's public ones.
        two_levels: Whether a worker is a process with all of its replicas (GPUs). Their gradients
            are then summed densely on the first replica's device, and the processes exchange the
            sums: one selection, one residual and one message per process. A single process
            exchanges nothing. The option has no effect with one replica per process. `False`: every
            replica is a worker. `None`: `True` under MultiWorkerMirroredStrategy with several
            processes and `direct_collectives`, else `False`.
        max_skipped_steps: Number of skipped steps in a row after which all workers raise; `None` or
            0: no limit.
        check_every: Number of steps between comparisons of the weights (bitwise), the learning
            rate and the step counter of all workers, from the first step of each `fit` on. The
            weights are compared again when `fit` ends. `None` or 0: no comparisons.
            `direct_collectives=False`, and replicas of one process as workers, disable comparisons,
            too.
        on_drift: Reaction to weights that differ. `"error"`: all workers raise an error that names
            the worker and the variable. `"restore"`: all workers copy worker 0's weights, slots
            and those floating-point states of the exchange that are equal on all workers, and
            worker 0 warns the 1st, 2nd, 4th, 8th ... time. Streaming methods keep those states. At
            the end of `fit` it only warns. Other differences always raise.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: an argument is out of range, or Keras does not know the optimizer's name. The
            optimizer is already wrapped. Both the optimizer and the method have momentum. At build
            time: two levels without direct collectives.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(
        ...     keras.optimizers.SGD(0.1), rs.RedSync(density=0.001, momentum=0.9))
        >>> isinstance(optimizer, rs.DistributedOptimizer)
        True
        >>> isinstance(optimizer, keras.optimizers.Optimizer)
        True
    """

    saving = keras.saving

    @checks.suggesting
    def __new__(
        cls,
        optimizer: Any,
        method: Method | Policy | Auto | None = None,
        *,
        warm_up: DenseWarmUp | None = None,
        name: str | None = None,
        bucket_bytes: int | None = None,
        direct_collectives: bool = True,
        two_levels: bool | None = None,
        max_skipped_steps: int | None = DEFAULT_LIMIT,
        check_every: int | None = DEFAULT_EVERY,
        on_drift: str = "error",
    ) -> DistributedOptimizer:
        """Create the wrapper for the optimizer's family."""
        if bucket_bytes is not None:
            checks.integer("bucket_bytes", bucket_bytes, low=1)
        checks.boolean("direct_collectives", direct_collectives)
        if two_levels is not None:
            checks.boolean("two_levels", two_levels)
        if max_skipped_steps is not None:
            checks.integer("max_skipped_steps", max_skipped_steps, low=0)
        if check_every is not None:
            checks.integer("check_every", check_every, low=0)
        checks.choice("on_drift", on_drift, DRIFT_CHOICES)
        _check_warm_up(warm_up)
        optimizer = _instance(optimizer)
        return _wrapper_class(optimizer)(
            optimizer,
            method,
            warm_up=warm_up,
            name=name,
            bucket_bytes=bucket_bytes,
            direct_collectives=direct_collectives,
            two_levels=two_levels,
            max_skipped_steps=max_skipped_steps,
            check_every=check_every,
            on_drift=on_drift,
        )

    @classmethod
    @override
    def saving_of(cls, inner_config: Any) -> ModuleType:
        saving: ModuleType = (_family_of(inner_config) or _family()).saving
        return saving

    @staticmethod
    @override
    def inner_from_config(config: Any, custom_objects: Any = None) -> Any:
        """Return the inner optimizer of a config, for `from_config`.

        Raises:
            ValueError: the config is invalid, or of another family and does not say so.
        """
        known = _family_of(config)
        family = known or _family()
        try:
            with family.saving.custom_object_scope(custom_objects or {}):
                return _instance(config, family)
        except ValueError as error:
            if known:
                raise
            raise ValueError(
                f"`inner_optimizer` of the config is not an optimizer of {family.__name__}. If it "
                f"is of another family, use `type(optimizer).from_config(config)`. {error}"
            ) from error

    @classmethod
    @override
    def __subclasshook__(cls, other: type) -> bool:
        """Return whether a class is a wrapper of any family, a subclass of `Wrapper`."""
        return cls is DistributedOptimizer and issubclass(other, Wrapper)


def _check_warm_up(warm_up: Any) -> None:
    """Raise `ValueError` unless this is `None` or a `DenseWarmUp`."""
    if warm_up is not None and not isinstance(warm_up, DenseWarmUp):
        raise ValueError(
            "`warm_up` must be None, DenseWarmUp(steps=...) or DenseWarmUp(fraction=...). "
            f"Received: warm_up={warm_up!r}{checks.class_hint(warm_up)}"
        )


def _family() -> Any:
    """Return the library of optimizers that are given by name or config."""
    return importlib.import_module("tf_keras") if requirements.wants_legacy_keras() else keras


def _family_of(config: Any) -> Any:
    """Return the library of an optimizer's config; `None` if no key tells it."""
    config = config if isinstance(config, dict) else {}
    module, inner = str(config.get("module")), config.get("config")
    keys = inner if isinstance(inner, dict) else {}
    if "loss_scale_factor" in keys:
        return keras
    if "is_legacy_optimizer" in keys or module.startswith(("keras.optimizers.legacy", "tf_keras.")):
        return importlib.import_module("tf_keras")
    return None


def _instance(optimizer: Any, family: Any = None) -> Any:
    """Return the Keras optimizer of a name or a config; anything else unchanged."""
    if not isinstance(optimizer, (str, dict)):
        return optimizer
    family = family or _family()
    try:
        if isinstance(optimizer, dict) and "module" in optimizer:  # of any optimizer's `serialize`
            return family.saving.deserialize_keras_object(copy.deepcopy(optimizer))
        return family.optimizers.get(copy.deepcopy(optimizer))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "`optimizer` must be an optimizer, or a name or a config for "
            f"`{family.__name__}.optimizers.get`. Received: optimizer={optimizer!r} ({error})"
        ) from error


def _wrapper_class(optimizer: Any) -> Any:
    if hasattr(optimizer, "exchange") and hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            "`optimizer` is already wrapped. Received: "
            f"optimizer={type(optimizer).__name__} around "
            f"{type(optimizer.inner_optimizer).__name__}. Wrap the inner optimizer once."
        )
    if isinstance(optimizer, keras.optimizers.Optimizer):
        from tf_redsync.keras.keras3 import Keras3Optimizer

        return Keras3Optimizer
    try:
        import tf_keras
    except ImportError:
        tf_keras = None
    if tf_keras is not None and isinstance(optimizer, tf_keras.optimizers.Optimizer):
        from tf_redsync.keras.tf_keras import ScaledTfKerasOptimizer, TfKerasOptimizer

        return ScaledTfKerasOptimizer if hasattr(optimizer, "loss_scale") else TfKerasOptimizer
    if tf_keras is not None and isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        from tf_redsync.keras.legacy import LegacyOptimizer, ScaledLegacyOptimizer

        return ScaledLegacyOptimizer if hasattr(optimizer, "loss_scale") else LegacyOptimizer
    swapped = isinstance(optimizer, (Method, Policy, Auto))
    hint = ". Pass the optimizer first and the method second" if swapped else ""
    raise TypeError(
        "`optimizer` must be an optimizer of keras, tf_keras or tf_keras.optimizers.legacy "
        f"(TensorFlow Addons). Received: optimizer={optimizer!r}{checks.class_hint(optimizer)}"
        f"{hint}"
    )
