"""`DistributedOptimizer`: wrap a Keras optimizer, whichever of the three families it is of."""

from __future__ import annotations

import abc
import copy
import importlib
from typing import Any

import keras
from typing_extensions import override

from tf_redsync import checks, requirements
from tf_redsync.auto import Auto
from tf_redsync.exchange.layout import DEFAULT_BUCKET_BYTES
from tf_redsync.exchange.method import Method
from tf_redsync.keras.wrapper import Wrapper
from tf_redsync.policy import Policy
from tf_redsync.schedules import DenseWarmUp
from tf_redsync.step.drift import CHOICES as DRIFT_CHOICES
from tf_redsync.step.drift import DEFAULT_EVERY
from tf_redsync.step.nonfinite import DEFAULT_LIMIT


class DistributedOptimizer(Wrapper, abc.ABC):
    """An optimizer whose gradients are exchanged by a compressed method.

    The all-reduce of gradients is replaced by the method's exchange; everything else (learning
    rate, weight decay, clipping, EMA, slots) stays the inner optimizer's. Clipping in the inner
    optimizer acts on each worker's own gradient, before the exchange, as in Keras.

    A step in which any worker contributes a non-finite value is applied by no worker: nothing
    changes but `optimizer.exchange.skipped`, which counts such steps, and which `fit` shows for
    each epoch as `skipped_steps`. After ten of them in a row a warning names worker and variable.

    Args:
        optimizer: A Keras 3, tf_keras or legacy (TensorFlow Addons) optimizer. Or what
            `keras.optimizers.get` makes one of, a name such as `"adam"` or a config; with
            TF_USE_LEGACY_KERAS=1 `tf_keras.optimizers.get`.
        method: How to exchange: `RedSync(...)`, `Dense(...)`, a `Policy` that chooses by variable,
            or `Auto(...)`, which chooses by measurement. `None`: `Auto()`.
        warm_up: `DenseWarmUp(steps=...)`, or `DenseWarmUp(fraction=...)` of the steps that `fit`
            will run: so long all gradients are all-reduced densely, whatever the method, which
            begins after it. `None`: none but the method's own. See docs/warm-up.md.
        name: Name of the wrapper.
        bucket_bytes: Tensors that share a method are exchanged together until they amount to this
            many float32 bytes.
        direct_collectives: Use single-round collectives where the strategy has them; `False`
            forces TensorFlow's public ones.
        two_levels: Whether a worker is a process with all of its replicas (GPUs). Their gradients
            are then summed densely, on the first one's device, and the sum is exchanged with the
            other processes: one selection, one residual and one message a process. In a single
            process nothing is left to compress, and with one replica a process nothing changes.
            `False`: every replica is a worker. `None`: `True` under MultiWorkerMirroredStrategy
            with several processes and `direct_collectives`, else `False`.
        max_skipped_steps: After so many skipped steps in a row all workers stop with an error;
            `None` or 0: never.
        check_every: In the first step and every so many steps after it, workers compare the bits
            of their weights, the learning rate and the step counter; `None` or 0: never. Nor with
            `direct_collectives=False`, or among replicas of one process.
        on_drift: What they do about a difference in the weights: `"error"`: all of them stop, with
            an error that names worker and variable; `"restore"`: they take over the weights and
            slots of worker 0, with a warning that says so. Other differences are errors.

    What is made is an optimizer of the family of the one inside, for `model.compile` or a custom
    loop, and an instance of this class for `isinstance`. Besides the usual it has `explain()`,
    `bytes_per_step()` and `exchange`. Its first step builds it with the variables of that step,
    unless `build(variables)` was called before.

    Raises:
        TypeError: for something that is not an optimizer.
        ValueError: for a name that Keras does not know, an optimizer that is already wrapped, or
            momentum on both sides; when it is built, for two levels without direct collectives.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(
        ...     keras.optimizers.SGD(0.1), rs.RedSync(density=0.001, momentum=0.9))
        >>> isinstance(optimizer, rs.DistributedOptimizer)
        True
        >>> isinstance(optimizer, keras.optimizers.Optimizer)
        True
    """

    @checks.suggesting
    def __new__(
        cls,
        optimizer: Any,
        method: Method | Policy | Auto | None = None,
        *,
        warm_up: DenseWarmUp | None = None,
        name: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        direct_collectives: bool = True,
        two_levels: bool | None = None,
        max_skipped_steps: int | None = DEFAULT_LIMIT,
        check_every: int | None = DEFAULT_EVERY,
        on_drift: str = "error",
    ) -> DistributedOptimizer:
        """Make the wrapper for the optimizer's family."""
        if two_levels is not None:
            checks.boolean("two_levels", two_levels)
        if max_skipped_steps is not None:
            checks.integer("max_skipped_steps", max_skipped_steps, low=0)
        if check_every is not None:
            checks.integer("check_every", check_every, low=0)
        checks.choice("on_drift", on_drift, DRIFT_CHOICES)
        if warm_up is not None and not isinstance(warm_up, DenseWarmUp):
            raise ValueError(
                "`warm_up` must be None, DenseWarmUp(steps=...) or DenseWarmUp(fraction=...). "
                f"Received: warm_up={warm_up!r}{checks.if_class(warm_up)}"
            )
        optimizer = _instance(optimizer)
        return _adapter(optimizer)(
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
    def __subclasshook__(cls, other: type) -> bool:
        """The wrappers of all families, which lie below this class, are of its kind."""
        return cls is DistributedOptimizer and issubclass(other, Wrapper)


def _instance(optimizer: Any) -> Any:
    """The optimizer that a name or a config means to Keras; anything else as it is."""
    if not isinstance(optimizer, (str, dict)):
        return optimizer
    family: Any = keras
    if requirements.wants_legacy_keras():
        family = importlib.import_module("tf_keras")
    try:
        if isinstance(optimizer, dict) and "module" in optimizer:  # of any optimizer's `serialize`
            return family.saving.deserialize_keras_object(copy.deepcopy(optimizer))
        return family.optimizers.get(copy.deepcopy(optimizer))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`optimizer` must be one that `{family.__name__}.optimizers.get` knows, where it is a "
            f"name or a config. Received: optimizer={optimizer!r} ({error})"
        ) from error


def _adapter(optimizer: Any) -> Any:
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
    hint = ". The optimizer comes first, and then the method" if swapped else ""
    raise TypeError(
        "`optimizer` must be an optimizer of keras, tf_keras or tf_keras.optimizers.legacy "
        f"(TensorFlow Addons). Received: optimizer={optimizer!r}{checks.if_class(optimizer)}"
        f"{hint}"
    )
