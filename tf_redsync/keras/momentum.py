"""Momentum of inner optimizers: which hyper-parameters of which class are one.

One table for the optimizers of Keras 3, tf_keras, `tf_keras.optimizers.legacy` and TensorFlow
Addons. A name alone does not tell: `beta_1` of `ScheduleFreeAdamW` is the weight of an average, by
which Keras divides, and `beta_1` of `Lion` may not be 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

from typing_extensions import override

LIBRARIES = ("keras", "tf_keras", "tensorflow_addons", "tf_redsync")
_SUSPECTED = ("momentum", "beta_1")  # by convention, in optimizers of others


class _Kind(NamedTuple):
    """What a class of optimizers has.

    Attributes:
        momenta: Hyper-parameters that are momentum of the gradients. With all of them 0 there is
            none.
        second_moment: The coefficient of its second moment, if it divides by one.
        needed: Whether it cannot do without momentum.
    """

    momenta: tuple[str, ...] = ()
    second_moment: str = ""
    needed: bool = False


_ADAM = _Kind(("beta_1",), "beta_2")
_NONE = _Kind()
_KINDS = {
    "SGD": _Kind(("momentum",)),
    "RMSprop": _Kind(("momentum",)),  # its second moment is short as it is: rho=0.9
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": _ADAM,
    "Nadam": _ADAM,
    "Lamb": _ADAM,
    "AMSGrad": _ADAM,
    # Both of matrices and of what AdamW serves in it; its second moment is of the latter alone.
    "Muon": _Kind(("momentum", "adam_beta_1")),
    # Its sign of a mean of gradients with a beta_1 of 0 is refused. Its beta_2 is of that mean.
    "Lion": _Kind(("beta_1",), needed=True),
    # It takes Adam's steps without momentum, and the gradients at a point that beta_1 sets.
    "ScheduleFreeAdamW": _Kind((), "beta_2"),
    "Adadelta": _NONE,
    "Adafactor": _NONE,
    "Adagrad": _NONE,
    "Ftrl": _NONE,
    # TensorFlow Addons; its AdamW, SGDW and LazyAdam are subclasses of Adam and SGD.
    "AdaBelief": _ADAM,
    "COCOB": _NONE,
    "ConditionalGradient": _NONE,
    "LAMB": _ADAM,
    "NovoGrad": _ADAM,
    "ProximalAdagrad": _NONE,
    "RectifiedAdam": _ADAM,
    "Yogi": _Kind(("beta1",), "beta2"),
}


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum of an optimizer, and its second moment.

    Attributes:
        optimizer: Name of its class, inside of all wrappers.
        values: By name, the hyper-parameters that are momentum and not 0.
        beta_2: The coefficient of its second moment, or `None` without one.
        needed: Whether it cannot do without momentum.
        known: Whether this is known of its class. Else `values` and `beta_2` are what is called so.
    """

    optimizer: str
    values: dict[str, float]
    beta_2: float | None
    needed: bool
    known: bool

    @override
    def __str__(self) -> str:
        return " and ".join(f"{name}={value:.4g}" for name, value in self.values.items())

    @property
    def removal(self) -> str:
        """How to take it away, in the imperative."""
        if not self.known:
            names = " or ".join(self.values)
            return (
                f"find out whether {names} of {self.optimizer}, an optimizer that tf_redsync does "
                "not know, is momentum and may be 0"
            )
        if self.needed:
            return (
                f"use another optimizer than {self.optimizer}, which needs its momentum, such as "
                "AdamW(beta_1=0.0)"
            )
        without = ", ".join(f"{name}=0.0" for name in self.values)
        return f"use {self.optimizer}({without})"


def of(optimizer: Any) -> Momentum:
    """Return the momentum of an optimizer of any family, or of the one inside of it."""
    inner = _inside(optimizer)
    kind, config = _kind(inner), inner.get_config()
    if kind is None:
        found = dict(config_numbers(config))
        suspected = {name: found[name] for name in _SUSPECTED if found.get(name)}
        return Momentum(type(inner).__name__, suspected, found.get("beta_2"), False, False)
    values = {name: config[name] for name in kind.momenta if _is_momentum(config.get(name))}
    beta_2 = config.get(kind.second_moment)
    beta_2 = float(beta_2) if isinstance(beta_2, numbers.Real) else None
    return Momentum(type(inner).__name__, values, beta_2, kind.needed, True)


def movable(optimizer: Any) -> float:
    """Return the momentum of an optimizer that an exchange may apply in its place; 0 for none.

    That of a plain SGD of Keras 3 or tf_keras, before it has a velocity. Weight decay, clipping and
    averages act on weights or on each worker's own gradient, and are the same beside either.
    Nesterov's form and updates of accumulated gradients are not.
    """
    inner = _inside(optimizer)
    home, config = type(inner).__module__, inner.get_config()
    plain = type(inner).__name__ == "SGD" and home.partition(".")[0] in ("keras", "tf_keras")
    if not plain or ".legacy" in home or getattr(inner, "built", False) or config["nesterov"]:
        return 0.0
    return 0.0 if config.get("gradient_accumulation_steps") else float(config["momentum"])


@contextlib.contextmanager
def left_to(exchange: Any, optimizer: Any) -> Iterator[None]:
    """Let an optimizer update without momentum where the exchange applies it in its place.

    Args:
        exchange: The built exchange.
        optimizer: Whose update is traced.
    """
    inner = _inside(optimizer)
    exchanged = any(a.method.traits.momentum_in_exchange for a in exchange.assignments)
    own = getattr(inner, "momentum", 0.0) if exchanged else 0.0
    if not own:
        yield
        return
    inner.momentum = 0.0
    try:
        yield
    finally:
        inner.momentum = own


def names(optimizer: Any) -> tuple[str, ...]:
    """Return the hyper-parameters that are momentum, if the optimizer's class is known."""
    kind = _kind(_inside(optimizer))
    return () if kind is None else kind.momenta


def config_numbers(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every `(key, number)` in a (nested) optimizer config."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, numbers.Real):
            yield key, value
        yield from config_numbers(value)


def _inside(optimizer: Any) -> Any:
    """The optimizer inside of all wrappers; those of TensorFlow Addons call it `_optimizer`."""
    while True:
        found = (getattr(optimizer, name, None) for name in ("inner_optimizer", "_optimizer"))
        inside = next((o for o in found if hasattr(o, "get_config")), None)
        if inside is None:
            return optimizer
        optimizer = inside


def _kind(optimizer: Any) -> _Kind | None:
    """What is known of a class, or of the one that it is derived from."""
    for base in type(optimizer).__mro__:
        if base.__module__.partition(".")[0] in LIBRARIES and base.__name__ in _KINDS:
            return _KINDS[base.__name__]
    return None


def _is_momentum(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value != 0
