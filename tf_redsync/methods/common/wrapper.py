"""A method around another one: what it leaves to the method inside."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

from typing_extensions import override

from tf_redsync.exchange.method import Method

# What `table()` says of a class, and what its messages are, which is what a wrapper changes.
OWN = ("paper", "requests", "bits", "sends_selected", "rounds_values", "payloads", "at")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodWrapper(Method):
    """A method that changes how another one's messages travel, and nothing else.

    All that programs, policies and optimizers ask of a method is answered by the method inside, or
    as `Method` does without one; a wrapper defines what it changes. See `_forwarded`.

    Args:
        method: The method inside; `None` where the wrapper is a method by itself.
    """

    method: Method | None = None

    # Its messages have a form already: another wrapper cannot give them a second one.
    sends_selected: ClassVar[bool] = False
    rounds_values: ClassVar[bool] = False

    @override
    def at(self, step: int) -> Method:
        inside = self.method and self.method.at(step)
        return self if inside is self.method else dataclasses.replace(self, method=inside)


def _forwarded(name: str, hook: Any) -> Any:
    """A hook of `Method` that asks the method inside."""

    def inner(self: MethodWrapper) -> Any:
        return getattr(self.method or Method(), name)

    if not isinstance(hook, types.FunctionType):
        return property(inner)

    @functools.wraps(hook)
    def call(self: MethodWrapper, *args: Any, **kwargs: Any) -> Any:
        return inner(self)(*args, **kwargs)

    return call


def hooks() -> dict[str, Callable[..., Any] | Any]:
    """Return what can be asked of a method, by name: everything public that `Method` defines."""
    return {name: hook for name, hook in vars(Method).items() if not name.startswith("_")}


for _name, _hook in hooks().items():
    if _name not in OWN:
        setattr(MethodWrapper, _name, _forwarded(_name, _hook))


def innermost(method: Any) -> Any:
    """Return the method inside of wrappers; what is none, as it is."""
    inner = getattr(method, "method", None)
    return innermost(inner) if isinstance(inner, Method) else method
