"""What an inner optimizer and a method cannot do together: errors, and a warning.

Everything is read from the optimizer's config, which all three families have alike.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_redsync.auto import Auto
from tf_redsync.methods.base import Method
from tf_redsync.methods.signs import SignSGD
from tf_redsync.policy import Policy

_MOMENTUM_KEYS = ("momentum", "beta_1")


def check_momentum(inner: Any, policy: Policy | Auto) -> None:
    """Check that momentum is applied once.

    Raises:
        ValueError: when both the optimizer and a method of the policy have one.
    """
    momentum = _find_momentum(inner.get_config())
    if momentum is not None:
        check_momentum_value(inner, policy, *momentum)


def check_momentum_value(inner: Any, policy: Policy | Auto, name: str, value: Any) -> None:
    """Check that the inner optimizer may have a hyper-parameter of this value.

    Raises:
        ValueError: when it is a momentum, and a method of the policy has one, too.
    """
    exchange_momentum = max(m.momentum_in_exchange for m in policy.methods)
    if name in _MOMENTUM_KEYS and value and exchange_momentum:
        raise ValueError(
            "momentum is set on both sides, so it would be applied twice. Received: "
            f"{name}={value} in {type(inner).__name__} and momentum={exchange_momentum} in the "
            f"method. Use an inner optimizer without momentum, e.g. SGD, or {name}=0.0 in "
            f"{type(inner).__name__}, or momentum=0.0 in the method."
        )


def _find_momentum(config: Any) -> tuple[str, float] | None:
    """The first non-zero momentum coefficient in a (nested) optimizer config."""
    found = _numbers(config)
    return next(((key, value) for key, value in found if key in _MOMENTUM_KEYS and value), None)


def _numbers(config: Any) -> Iterator[tuple[str, Any]]:
    """Every `(key, number)` in a (nested) optimizer config."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, numbers.Real):
            yield key, value
        yield from _numbers(value)


def check_own_weights(inner: Any, policy: Policy | Auto) -> None:
    """Check that nothing but the update changes weights of which each worker has its own.

    Raises:
        ValueError: for averages of the weights, and weight decay where points are a worker's own.
    """
    own = [m for m in policy.methods if m.cadence.own_weights]
    config = dict(_numbers(inner.get_config()))
    if own and config.get("use_ema"):
        raise ValueError(
            f"`use_ema` averages each worker's own weights with {type(own[0]).__name__}. Received: "
            "use_ema=True. Use use_ema=False, or another method."
        )
    points = [m for m in own if m.cadence.own_point]
    if points and (config.get("weight_decay") or type(innermost(inner)).__name__ != "SGD"):
        raise ValueError(
            f"{type(points[0]).__name__} moves each worker along its own gradient, which it can do "
            f"for SGD without `weight_decay`. Received: {type(innermost(inner)).__name__} with "
            f"weight_decay={config.get('weight_decay')}. Use SGD, and a kernel_regularizer for "
            "weight decay."
        )


def check_warm_up(policy: Policy | Auto, warm_up: Any) -> None:
    """Check that a dense warm-up would change something.

    Raises:
        ValueError: for methods of votes alone, which have no dense exchange of the same scale.
    """
    voting = [m for m in policy.methods if isinstance(m, SignSGD)]
    if warm_up is not None and len(voting) == len(policy.methods):
        raise ValueError(
            f"`warm_up` has no effect with {type(voting[0]).__name__}, whose totals are no sums of "
            f"gradients and want a learning rate of another size. Received: warm_up={warm_up!r}. "
            "Use warm_up=None."
        )


def suited(inner: Any, policy: Policy | Auto, warn: Callable[[str], None]) -> Policy | Auto:
    """Return what of `policy` goes with an inner optimizer.

    That is `policy`, but for candidates that `Auto` has by default.

    Args:
        inner: The optimizer.
        policy: What the user asked for.
        warn: Called with a warning for each method that goes badly with it.

    Raises:
        ValueError: see `check_momentum` and `check_own_weights`.
    """
    check_momentum(inner, policy)
    check_own_weights(inner, policy)
    if isinstance(policy, Auto):
        return policy.suited(lambda method: trouble_with_adaptive(inner, method))
    for method in policy.methods:
        trouble = trouble_with_adaptive(inner, method)
        if trouble is not None:
            warn(trouble)
    return policy


def trouble_with_adaptive(inner: Any, method: Method) -> str | None:
    """Return what is wrong with a method for an adaptive optimizer, or `None`.

    A second moment that falls while elements wait makes their next step too long. With local steps
    nothing waits for an optimizer, which sees the gradient of every step of its worker.
    """
    adaptive, what = innermost(inner), type(method).__name__
    if getattr(adaptive, "amsgrad", False):
        return None
    name = type(adaptive).__name__
    if method.needs_amsgrad:
        return (
            f"{what} is made for AMSGrad. Received: {name}. Use tf_redsync.AMSGrad (Keras 3) "
            "or Adam(amsgrad=True)."
        )
    if method.cadence.local_steps:
        return None
    beta_2 = dict(_numbers(inner.get_config())).get("beta_2")
    if beta_2 is not None and method.waiting_steps * (1.0 - beta_2) >= 1.0 - 1e-6:
        return (
            f"{what} sends an element every {method.waiting_steps:.0f} steps on average, and "
            f"{name} forgets its second moment in {1.0 / (1.0 - beta_2):.0f} steps, so that "
            "elements take long steps when they are sent at last. Use AMSGrad "
            "(tf_redsync.AMSGrad, Adam(amsgrad=True)), or a higher density; see "
            "docs/adaptive.md."
        )
    return None


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside of all wrappers."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def check_accumulation(inner: Any) -> None:
    """Check that the optimizer calls the exchange in every step.

    Raises:
        ValueError: for gradient accumulation in the optimizer, with several workers.
    """
    key = "gradient_accumulation_steps"  # of this optimizer or of one inside it
    steps = dict(_numbers(inner.get_config())).get(key)
    if steps and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "`gradient_accumulation_steps` of the inner optimizer puts the exchange inside a "
            "branch, where collectives of several replicas cannot run. Received: "
            f"gradient_accumulation_steps={steps}. Use a larger batch instead."
        )


def never_asks(inner: Any) -> ValueError:
    """Return the error for an optimizer that updates without the exchange."""
    name = type(inner).__name__
    return ValueError(
        f"{name} hands its gradients on to other optimizers and never asks for their sums, so "
        f"nothing would be compressed. Received: optimizer={name}. Wrap each of its optimizers "
        f"instead: {name} of DistributedOptimizer(...)s."
    )
