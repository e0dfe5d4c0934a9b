"""Attributes of a wrapper that are those of the optimizer inside it.

A wrapper is an optimizer of its family, so it has the family's attributes itself: a weight decay, a
norm to clip to, and so on, which nobody would ever look at. They are taken from it, so that Python
asks `__getattr__` for them, which asks the optimizer inside.

Whatever is written is passed on, and acts, or is refused. What is a variable, such as the learning
rate, may change at any time. The rest are constants of the step that is traced, or decide which
variables there are: they may change until the optimizer is built.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tf_redsync.keras import conflicts

_OWN = ("name", "built")  # that the inner optimizer has as well, and means something else by
_READ_ONLY = ("exchange", "inner_optimizer")
_PLAIN = (bool, int, float, str, type(None))


class Inner:
    """An attribute of the family's base class for which the inner optimizer's stands."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        inner = vars(wrapper).get("inner_optimizer")  # the base class's constructor asks, too
        return None if inner is None else getattr(inner, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        if "inner_optimizer" in vars(wrapper):  # else the base class's constructor is at work
            wrapper.pass_on(self._name, value)


class PassingOn:
    """Passes attributes on; a part of `Wrapper`."""

    inner_optimizer: Any
    exchange: Any
    _adapter: Any

    def forget_own(self) -> None:
        """Take from this what its base class has set and the inner optimizer has, too."""
        for name in [n for n in vars(self) if not n.startswith("_") and n not in _OWN]:
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
                f"`{name}` of a DistributedOptimizer cannot be changed. Wrap a new optimizer."
            )
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not wrapped or own or self._owner(name) is None:
            super().__setattr__(name, value)
        else:
            self.pass_on(name, value)

    def set_own(self, name: str, value: Any) -> None:
        """Set an attribute of this, which users cannot."""
        super().__setattr__(name, value)

    def pass_on(self, name: str, value: Any) -> None:
        """Set an attribute of the inner optimizer.

        Raises:
            AttributeError: for one that it does not have.
            ValueError: where it would have no effect, or not go with the method.
        """
        owner = self._owner(name)
        if owner is None:
            raise AttributeError(f"{type(self.inner_optimizer).__name__!r} has no {name!r}")
        old = getattr(owner, name)
        self.refuse(name, value)
        if hasattr(old, "assign") and not callable(value):
            setattr(owner, name, value)  # a variable: the next step reads it
        elif not (isinstance(old, _PLAIN) and isinstance(value, _PLAIN) and old == value):
            self.refuse_if_built(name, value)
            setattr(owner, name, value)
            try:
                self._adapter.check_inner()
            except ValueError:
                setattr(owner, name, old)
                raise

    def refuse_if_built(self, name: str, value: Any) -> None:
        """Refuse what has no effect on variables that exist and on steps that are traced.

        Raises:
            ValueError: after `build`.
        """
        if self.exchange.built:
            raise ValueError(
                f"`{name}` is fixed once the optimizer is built: a traced step holds its value. "
                f"Received: {name}={value!r}. Set it before the first step, or compile the model "
                "with a new optimizer."
            )

    def refuse(self, name: str, value: Any) -> None:
        """Refuse what could not act, whenever it is set.

        Raises:
            ValueError: for XLA, a second factor of the loss, and the like.
        """
        innermost = conflicts.innermost(self.inner_optimizer)
        conflicts.check_momentum_value(innermost, self._adapter.policy, name, value)
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
                "`loss_scale_factor` would scale the loss twice: there is a LossScaleOptimizer "
                f"inside. Received: loss_scale_factor={value!r}"
            )

    def _owner(self, name: str) -> Any:
        """The optimizer inside that has an attribute, the innermost one first, or `None`."""
        inner = self.inner_optimizer
        candidates = (conflicts.innermost(inner), inner)
        return next((o for o in candidates if hasattr(o, name)), None)
