"""Errors for inner optimizers and methods that cannot be combined.

The checks read the optimizer's config, which has the same form in all three families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_redsync.auto import Auto
from tf_redsync.exchange.capabilities import AdamMoments, capability, dense_start
from tf_redsync.exchange.method import Method
from tf_redsync.keras import momentum
from tf_redsync.keras.momentum import config_numbers, config_of
from tf_redsync.methods.common.wrapper import innermost as innermost_method
from tf_redsync.network import strategies
from tf_redsync.policy import Policy

# Classes that compute weights from slots; the first is the base of Addons' MovingAverage and SWA.
_FROM_SLOTS = {"AveragedOptimizerWrapper", "Ftrl", "ScheduleFreeAdamW"}


def check_momentum(inner: Any, policy: Policy | Auto) -> None:
    """Check that momentum is not applied twice.

    Raises:
        ValueError: both the optimizer and a method of the policy have momentum.
    """
    setting, method = momentum.of(inner), with_momentum(policy.methods)
    if setting.known and setting.values and method is not None:
        raise _double_momentum_error(setting, method)


def check_momentum_value(inner: Any, policy: Policy | Auto, name: str, value: Any) -> None:
    """Check a new value of a hyper-parameter of the inner optimizer.

    Raises:
        ValueError: the hyper-parameter is momentum, and a method of the policy has momentum, too.
    """
    method = with_momentum(policy.methods)
    if method is not None and name in momentum.names(inner) and value:
        setting = dataclasses.replace(momentum.of(inner), values={name: value})
        raise _double_momentum_error(setting, method)


def with_momentum(methods: Sequence[Method]) -> Method | None:
    """Return the first method that applies momentum in the exchange, or `None`."""
    return next((m for m in methods if m.traits.momentum_in_exchange), None)


def _double_momentum_error(setting: momentum.Momentum, method: Method) -> ValueError:
    return ValueError(
        "momentum is set on both sides, so it would be applied twice. Received: "
        f"{setting} in {setting.optimizer} and {exchanged_momentum(method)}. "
        f"{one_side(setting, method)}"
    )


def exchanged_momentum(method: Method) -> str:
    """Return the momentum of a method with the name of its argument."""
    value = f"{method.traits.momentum_in_exchange:.4g}"
    own = hasattr(innermost_method(method), "momentum")
    return f"{f'momentum={value}' if own else f'a momentum of {value}'} in {type(method).__name__}"


def one_side(setting: momentum.Momentum, method: Method) -> str:
    """Return the advice to keep one of an optimizer's and a method's momentum."""
    if not hasattr(innermost_method(method), "momentum"):
        return f"Instead, {setting.removal}."
    if setting.known and setting.beta_2 is not None and method.traits.waiting_steps > 1.0:
        return f"Instead of {setting.optimizer} use SGD with CodedAdam(); see docs/adaptive.md."
    return f"Either {setting.removal}, or use momentum=0.0 in the method."


def check_per_worker_weights(inner: Any, policy: Policy | Auto) -> None:
    """Check that only the update changes weights that differ between workers.

    Raises:
        ValueError: see `per_worker_weights`.
    """
    conflict = per_worker_weights(inner, policy.methods)
    if conflict is not None:
        raise ValueError(conflict)


def per_worker_weights(inner: Any, methods: Sequence[Method]) -> str | None:
    """Return the conflict of an optimizer with weights that differ between workers, or `None`.

    Averages of weights, and weights that an optimizer computes from its slots, would differ.
    Methods with per-worker points need SGD without weight decay.
    """
    per_worker = [m for m in methods if m.sync_schedule.per_worker_weights]
    if not per_worker:
        return None
    label, config = type(per_worker[0]).__name__, dict(config_numbers(config_of(inner)))
    if config.get("use_ema"):
        return (
            f"`use_ema` must be False with {label}, whose weights differ between workers. "
            "Received: use_ema=True. Use use_ema=False, or another method."
        )
    for kind in map(type, momentum.nested(inner)):
        if not _FROM_SLOTS.isdisjoint(base.__name__ for base in kind.__mro__):
            return (
                f"{kind.__name__} computes weights from its slots, which {label} does not average "
                f"over the workers. Received: {kind.__name__}. Use another optimizer, or a method "
                "that exchanges gradients in every step."
            )
    points = [m for m in per_worker if m.sync_schedule.own_point]
    if points and (config.get("weight_decay") or type(innermost(inner)).__name__ != "SGD"):
        return (
            f"{type(points[0]).__name__} moves each worker along its own gradient and needs SGD "
            f"without `weight_decay`. Received: {type(innermost(inner)).__name__} with "
            f"weight_decay={config.get('weight_decay')}. Use SGD, and a kernel_regularizer for "
            "weight decay."
        )
    if points:
        return _clipping(inner, type(points[0]).__name__, "but not its local steps")
    return None


def _clipping(inner: Any, method: str, harm: str) -> str | None:
    """Return the conflict of an optimizer that clips totals, not gradients, or `None`."""
    clipping = momentum.clipping_of_totals(inner)
    if not clipping:
        return None
    return (
        f"tf_keras would clip the totals of {method}, {harm}. Received: {clipping}. Clip "
        "gradients before `apply_gradients`, or use Keras 3, which clips those."
    )


def check_adam(inner: Any, policy: Policy | Auto) -> None:
    """Check that a method whose totals are Adam's momenta is used with Adam.

    Raises:
        ValueError: the optimizer is not a Keras Adam or AdamW without amsgrad, or a coefficient
            differs.
    """
    pairs = ((m, capability(m, AdamMoments)) for m in policy.methods)
    methods = [(m, moments.adam) for m, moments in pairs if moments is not None]
    if not methods:
        return
    label, adam = type(methods[0][0]).__name__, innermost(inner)
    home = type(adam).__module__.partition(".")[0]
    plain = type(adam).__name__ in ("Adam", "AdamW") and home in ("keras", "tf_keras")
    if not plain or config_of(adam).get("amsgrad"):
        raise ValueError(
            f"{label} exchanges the momentum of Adam, scaled by its variance. Received: "
            f"{type(adam).__name__}{'(amsgrad=True)' if plain else ''}. Use Keras's Adam or AdamW "
            "without amsgrad, or another method."
        )
    conflict = _clipping(adam, label, "which are momenta")
    if conflict is not None:
        raise ValueError(conflict)
    config = config_of(adam)
    for method, betas in methods:
        for name, value in betas.items():
            if value != float(config[name]):
                raise ValueError(
                    f"`{name}` must be equal in {type(method).__name__} and the optimizer. "
                    f"Received: {name}={value} in {type(method).__name__}, and {name}="
                    f"{config[name]} in {type(adam).__name__}"
                )


def check_sgd(inner: Any, policy: Policy | Auto) -> None:
    """Check that a method whose totals are adapted updates is used with SGD.

    Raises:
        ValueError: the optimizer is not SGD, has momentum, or clips totals.
    """
    adapting = next((m for m in policy.methods if m.traits.needs_sgd), None)
    if adapting is None:
        return
    label, found, values = type(adapting).__name__, innermost(inner), momentum.of(inner).values
    if not any(kind.__name__ == "SGD" for kind in type(found).__mro__) or values:
        received = ", ".join(f"{name}={value}" for name, value in values.items())
        raise ValueError(
            f"{label} adapts the step of each element as Adam does, so the optimizer must be SGD "
            f"without momentum. Received: {type(found).__name__}({received}). Use "
            "SGD(learning_rate, weight_decay=...) with the values of Adam or AdamW."
        )
    conflict = _clipping(inner, label, "which are updates, not gradients")
    if conflict is not None:
        raise ValueError(conflict)


def warm_up(policy: Policy | Auto, requested: Any) -> Any:
    """Return the dense warm-up of all methods: the user's, or the dense start of a method.

    Raises:
        ValueError: both are given, dense starts differ, or a warm-up is given and all methods vote:
            dense totals of votes need a learning rate of another scale.
    """
    begins = [m for m in policy.methods if dense_start(m) is not None]
    if begins and (requested is not None or len({dense_start(m) for m in begins}) > 1):
        raise ValueError(
            f"{type(begins[0]).__name__} has its own dense start. Received: warm_up={requested!r} "
            f"and {', '.join(map(repr, begins))}. Use warm_up=None, and "
            "the same dense start in all methods."
        )
    if begins:
        return dense_start(begins[0])
    voting = [m for m in policy.methods if m.traits.votes]
    if requested is not None and len(voting) == len(policy.methods):
        raise ValueError(
            f"`warm_up` cannot be used with {type(voting[0]).__name__}, whose totals are votes "
            f"that need a learning rate of another scale. Received: warm_up={requested!r}. Use "
            "warm_up=None."
        )
    return requested


def check_aggregation(optimizer: Any, function: Any) -> None:
    """Check that the function that sums gradients over replicas is Keras's own.

    Raises:
        ValueError: it is the user's, but the exchange replaces it.
    """
    if not defined_in("tf_keras", function):
        raise ValueError(
            "an optimizer cannot have its own function that sums gradients over replicas: the "
            f"exchange replaces it. Received: {function!r} in {type(optimizer).__name__}. Remove "
            "it, and change gradients before they are passed to `apply_gradients`."
        )


def defined_in(package: str, function: Any) -> bool:
    """Return whether a function is defined in a package."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] == package


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside this package's wrappers; compare `momentum.innermost`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def accumulates(inner: Any) -> bool:
    """Return whether an optimizer, or one inside it, accumulates gradients over steps."""
    return bool(accumulation_steps(inner))


def accumulation_steps(inner: Any) -> int:
    """Return the number of steps over which an optimizer accumulates gradients, or 0."""
    steps = dict(config_numbers(config_of(inner))).get("gradient_accumulation_steps")
    return int(steps or 0)


def late_accumulation(steps: int | None) -> ValueError:
    """Return the error for a number of accumulated steps that is set on a wrapped optimizer."""
    return ValueError(
        "`gradient_accumulation_steps` cannot be set on a wrapped optimizer. Pass it to the inner "
        f"optimizer's constructor. Received: gradient_accumulation_steps={steps or None}"
    )


def check_accumulation(inner: Any, exchange: Any) -> None:
    """Check that an exchange can run in the update branch of gradient accumulation.

    Raises:
        ValueError: a process has several replicas, or there are no direct collectives.
    """
    strategy = exchange.strategy
    if strategy.num_replicas_in_sync == 1 or not accumulates(inner):
        return
    replicas = strategies.local_replicas(strategy)
    if exchange.network.in_branches and replicas == 1:
        return
    raise ValueError(
        "`gradient_accumulation_steps` needs processes with a single replica and direct "
        "collectives, because it puts the exchange into a branch. Received: "
        f"gradient_accumulation_steps={accumulation_steps(inner)} under "
        f"{type(strategy).__name__} with {replicas} replicas in a process, and "
        f"{type(exchange.network).__name__}. Start one process per device under "
        "MultiWorkerMirroredStrategy, or use a larger batch."
    )


def check_overwritten(variables: Sequence[Any], strategy: Any) -> None:
    """Check that all variables are updated by sums over the workers.

    Keras 3 overwrites the scales of float8 layers with their gradients, and does not sum them.

    Raises:
        ValueError: several replicas would train a float8 layer.
    """
    names = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if names and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "float8 layers cannot be trained on several workers: Keras overwrites their scales "
            "with those of each worker's own batch, so the models would differ. Received: "
            f"{len(names)} such variables, the first is {names[0]!r}. Train without "
            "`quantize('float8')`, for example with the dtype policy 'mixed_bfloat16'."
        )


def check_single(optimizer: Any) -> None:
    """Check that an optimizer applies gradients itself.

    Raises:
        ValueError: the optimizer is a `MultiOptimizer`, whose optimizers sum their own gradients.
    """
    if is_multi_optimizer(innermost(optimizer)):
        raise bypasses_exchange(innermost(optimizer))


def bypasses_exchange(inner: Any) -> ValueError:
    """Return the error for an optimizer that updates without the exchange."""
    name = type(inner).__name__
    recipe = f"{name} of DistributedOptimizer(...)s"
    if is_multi_optimizer(inner):
        each = "DistributedOptimizer(optimizer, method)"
        addons = hasattr(inner, "optimizer_specs")
        recipe = f"{name}([({each}, layers), ...])"
        if not addons:
            recipe = f"{name}(OptimizerMap({each}, {{pattern: {each}, ...}}))"
    return ValueError(
        f"{name} passes its gradients to other optimizers without an all-reduce of its own, so "
        f"nothing would be compressed. Received: optimizer={name}. Wrap each of its optimizers "
        f"instead: {recipe}; see docs/adaptive.md."
    )


def is_multi_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is a `MultiOptimizer` of Keras 3 or TensorFlow Addons."""
    return any(
        kind.__name__ == "MultiOptimizer"
        and kind.__module__.partition(".")[0] in momentum.LIBRARIES
        for kind in type(optimizer).__mro__
    )
