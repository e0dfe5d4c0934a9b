"""The momentum of inner optimizers, by a table of each class's hyper-parameters.

The table covers Keras 3, tf_keras, `tf_keras.optimizers.legacy` and TensorFlow Addons. Names alone
are ambiguous. `beta_1` of `ScheduleFreeAdamW` is the weight of an average, by which Keras divides,
and `beta_1` of `Lion` cannot be 0.

Private names of Keras used here: `_learning_rate` of optimizers, `_hyper` of legacy ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from typing_extensions import override

LIBRARIES = ("keras", "tf_keras", "tensorflow_addons", "tf_redsync")
_SUSPECTED = ("momentum", "beta_1")  # conventional names in unknown optimizers


class _Kind(NamedTuple):
    """The names of an optimizer class's hyper-parameters.

    Attributes:
        momenta: Hyper-parameters that are momentum of the gradients. If all are 0, there is no
            momentum.
        second_moment: Decay of the second moment; "" without one.
        needed: Whether the optimizer requires momentum.
    """

    momenta: tuple[str, ...] = ()
    second_moment: str = ""
    needed: bool = False


_ADAM = _Kind(("beta_1",), "beta_2")
_NONE = _Kind()
_KINDS = {
    "SGD": _Kind(("momentum",)),
    "RMSprop": _Kind(("momentum",)),  # with rho=0.9, its second moment is short anyway
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": _ADAM,
    "Nadam": _ADAM,
    "Lamb": _ADAM,
    "AMSGrad": _ADAM,
    # Momentum of its matrices and of its AdamW, which alone has a second moment.
    "Muon": _Kind(("momentum", "adam_beta_1")),
    # Rejects beta_1=0. Its beta_2 belongs to the mean of gradients, not to a second moment.
    "Lion": _Kind(("beta_1",), needed=True),
    # Takes Adam's steps without momentum; beta_1 sets the point of the gradients.
    "ScheduleFreeAdamW": _Kind((), "beta_2"),
    "Adadelta": _NONE,
    "Adafactor": _NONE,
    "Adagrad": _NONE,
    "Ftrl": _NONE,
    # TensorFlow Addons, whose AdamW, SGDW and LazyAdam are subclasses of Adam and SGD.
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
    """Momentum and second moment of an optimizer.

    Attributes:
        optimizer: Name of the innermost optimizer's class.
        values: Hyper-parameters that are momentum and not 0, by name.
        beta_2: Decay of the second moment; `None` without one.
        needed: Whether the optimizer requires momentum.
        known: Whether the class is in the table. Otherwise `values` and `beta_2` are guessed by
            name.
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
        """Text in the imperative that tells the user how to remove the momentum."""
        if not self.known:
            names = " or ".join(self.values)
            return (
                f"check whether {names} of {self.optimizer}, which tf_redsync does not know, is "
                "momentum and can be 0"
            )
        if self.needed:
            return (
                f"replace {self.optimizer}, which requires momentum, by another optimizer such as "
                "AdamW(beta_1=0.0)"
            )
        without = ", ".join(f"{name}=0.0" for name in self.values)
        return f"use {self.optimizer}({without})"


def of(optimizer: Any) -> Momentum:
    """Return the momentum of an optimizer of any family, or of the innermost optimizer."""
    inner = innermost(optimizer)
    kind, config = _kind(inner), config_of(inner)
    if kind is None:
        settings = dict(config_numbers(config))
        suspected = {name: settings[name] for name in _SUSPECTED if settings.get(name)}
        return Momentum(type(inner).__name__, suspected, settings.get("beta_2"), False, False)
    values = {name: config[name] for name in kind.momenta if _is_momentum(config.get(name))}
    beta_2 = config.get(kind.second_moment)
    beta_2 = float(beta_2) if isinstance(beta_2, numbers.Real) else None
    return Momentum(type(inner).__name__, values, beta_2, kind.needed, True)


def movable(optimizer: Any) -> float:
    """Return the momentum that an exchange may apply instead of the optimizer; 0 for none.

    Only the momentum of a Keras 3 or tf_keras SGD that is not built can be moved. Weight decay,
    averages and Keras 3's clipping act on weights or local gradients, so moving the momentum does
    not affect them; tf_keras would clip velocities. Nesterov momentum and the momentum of
    accumulated gradients cannot be moved.
    """
    inner = innermost(optimizer)
    home, config = type(inner).__module__, config_of(inner)
    plain = type(inner).__name__ == "SGD" and home.partition(".")[0] in ("keras", "tf_keras")
    if not plain or ".legacy" in home or getattr(inner, "built", False) or config["nesterov"]:
        return 0.0
    if config.get("gradient_accumulation_steps") or clipping_of_totals(inner):
        return 0.0
    return float(config["momentum"])


def clipping_of_totals(optimizer: Any) -> dict[str, Any]:
    """Return the clipping arguments of an optimizer of tf_keras, which clips exchanged totals.

    Keras 3 clips each worker's own gradient.
    """
    inner = innermost(optimizer)
    if not any(base.__module__.startswith("tf_keras.") for base in type(inner).__mro__):
        return {}
    config = config_of(inner)
    return {n: config[n] for n in ("clipnorm", "global_clipnorm", "clipvalue") if config.get(n)}


@contextlib.contextmanager
def set_to_zero(optimizer: Any) -> Iterator[None]:
    """Context that sets the momentum of the innermost optimizer to 0, if it has any."""
    inner = innermost(optimizer)
    value = getattr(inner, "momentum", 0.0)
    if not value:
        yield
        return
    inner.momentum = 0.0
    try:
        yield
    finally:
        inner.momentum = value


def names(optimizer: Any) -> tuple[str, ...]:
    """Return the names of the momentum hyper-parameters, if the optimizer's class is known."""
    kind = _kind(innermost(optimizer))
    return () if kind is None else kind.momenta


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's config, if possible without a learning rate that is a function."""
    config: dict[str, Any] = {}
    with without_rate_function(optimizer), contextlib.suppress(AttributeError):
        config = optimizer.get_config()
    return config or optimizer.get_config()  # a user's class may read the function


@contextlib.contextmanager
def without_rate_function(optimizer: Any) -> Iterator[Callable[..., Any] | None]:
    """Context that replaces a learning rate that is a function, such as a schedule, by 0.

    Keras trains with a schedule without `get_config`, but cannot serialize it.

    Args:
        optimizer: An optimizer of any family; the rate is that of the innermost one.

    Yields:
        The function, or `None` if the rate is a number or a variable.
    """
    attributes, name = vars(innermost(optimizer)), "_learning_rate"
    if "_hyper" in attributes:
        attributes, name = attributes["_hyper"], "learning_rate"
    rate = attributes.get(name)
    if not callable(rate):
        yield None
        return
    attributes[name] = 0.0
    try:
        yield rate
    finally:
        attributes[name] = rate


def config_numbers(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every `(key, number)` in a nested optimizer config."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, numbers.Real):
            yield key, value
        yield from config_numbers(value)


def nested(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those inside it, from the outermost to the innermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = _inside(optimizer)


def innermost(optimizer: Any) -> Any:
    """Return the innermost optimizer, also inside wrappers of TensorFlow Addons."""
    while (inside := _inside(optimizer)) is not None:
        optimizer = inside
    return optimizer


def _inside(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper, which Addons call `_optimizer`, or `None`."""
    candidates = (getattr(optimizer, name, None) for name in ("inner_optimizer", "_optimizer"))
    return next((o for o in candidates if hasattr(o, "get_config")), None)


def _kind(optimizer: Any) -> _Kind | None:
    """Return the table's row of a class or its base classes, or `None`."""
    for base in type(optimizer).__mro__:
        if base.__module__.partition(".")[0] in LIBRARIES and base.__name__ in _KINDS:
            return _KINDS[base.__name__]
    return None


def _is_momentum(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value != 0
