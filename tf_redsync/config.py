"""Serialization of frozen dataclasses to JSON: methods, policies, schedules, codings.

As in Keras, `get_config` returns the arguments of the constructor, the class method `from_config`
builds an equal object from them, and `serialize` adds the name of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import numbers
import pkgutil
import reprlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tf_redsync import checks

# Imported on lookup, since a file may name a method that the program has not imported.
_MODULES = ("tf_redsync.methods", "tf_redsync.contrib", "tf_redsync.auto.bit_budget")

_REGISTRY: dict[str, type] = {}
_T = TypeVar("_T")
Lookup = Callable[[str], "type | None"]


def register(cls: type[_T]) -> type[_T]:
    """Register a frozen dataclass by its name, so that configs can be loaded; a class decorator.

    Raises:
        ValueError: another class is registered under this name.
    """
    ours = cls.__module__.startswith("tf_redsync.")
    known = (_REGISTRY if ours else registered()).get(cls.__name__)
    if known is not None and (known.__module__, known.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise ValueError(
            f"a class of this name is already registered: {known.__module__}.{known.__qualname__}. "
            "In a saved model the name would be ambiguous. Received: "
            f"{cls.__module__}.{cls.__qualname__}. Rename your class."
        )
    _REGISTRY[cls.__name__] = cls
    cls.__init__ = _by_name(cls, cls.__init__)  # type: ignore[method-assign]
    return cls


def _by_name(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that converts NumPy scalars and lists the arguments in its errors."""
    fields = dataclasses.fields(cls)
    names, named = [f.name for f in fields if f.init], all(f.kw_only for f in fields)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        made_of = type(self).__name__
        args = tuple(map(checks.to_python, args))
        kwargs = {n: checks.to_python(v) for n, v in kwargs.items()}
        if args and named:
            numeric = [n for n in ("density", *names) if _takes_number(cls, n)]
            number = isinstance(args[0], numbers.Real) and numeric
            hint = f", as in {made_of}({numeric[0]}={args[0]!r})" if number else ""
            listed = f"Arguments: {', '.join(names)}." if names else "It has none."
            raise TypeError(
                f"{made_of} takes its arguments by name{hint}. {listed} Received: "
                f"{made_of}({', '.join(map(reprlib.repr, args))})"
            )
        for name in kwargs:
            if name not in names and type(self) is cls:
                hint = checks.suggestion(name, names)
                raise TypeError(f"{made_of} has no argument `{name}`. {hint}")
        init(self, *args, **kwargs)

    return made


def _takes_number(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), numbers.Real)


def registered() -> dict[str, type]:
    """Return all registered classes by name, imported or not."""
    for module in _MODULES:
        importlib.import_module(module)
    return dict(_REGISTRY)


def registered_in(package: str) -> dict[str, type]:
    """Import all modules of a package, and return the classes that they register, by name."""
    folder = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(folder, f"{package}."):
        importlib.import_module(module.name)
    return {n: c for n, c in _REGISTRY.items() if c.__module__.startswith(f"{package}.")}


class Configurable:
    """Base of frozen dataclasses that `serialize` and `from_config` convert, nested ones too."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, JSON-serializable."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return _encode(values)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, type] | None = None
    ) -> Any:
        """Build an object from the result of `get_config`.

        Args:
            config: The arguments of the constructor.
            custom_objects: Classes by name, for nested objects of unregistered classes.

        Raises:
            ValueError: an argument is missing, unknown or invalid.
        """
        return _construct(cls, config, (custom_objects or {}).get)


def serialize(value: Any) -> dict[str, Any]:
    """Return a JSON-serializable dict from which `from_config` builds an equal object."""
    return {"class_name": type(value).__name__, "config": value.get_config()}


def from_config(config: dict[str, Any], lookup: Lookup | None = None) -> Any:
    """Build an object from the result of `serialize`.

    Args:
        config: A dict with `class_name` and `config`.
        lookup: Returns the class of an unregistered name, or `None`.

    Raises:
        ValueError: the class is unknown, or the config does not fit it.
    """
    if not isinstance(config, dict) or not {"class_name", "config"} <= set(config):
        raise ValueError(
            f"a config must be a dict with 'class_name' and 'config'. Received: {config!r}"
        )
    name = config["class_name"]
    cls = None
    if isinstance(name, str):
        cls = _REGISTRY.get(name) or registered().get(name) or (lookup(name) if lookup else None)
    if cls is None:
        raise ValueError(
            f"`class_name` must be one of {sorted(_REGISTRY)}. Decorate your own classes with "
            "tf_redsync.methods.register, or pass them as `custom_objects`. "
            f"Received: class_name={name!r}"
        )
    return _construct(cls, config["config"], lookup)


def _construct(cls: type, config: Any, lookup: Lookup | None) -> Any:
    if not isinstance(config, dict):
        raise ValueError(
            f"the config of {cls.__name__} must be a dict. Received: config={config!r}"
        )
    fields = [f for f in dataclasses.fields(cls) if f.init]
    unknown = sorted(set(config) - {f.name for f in fields})
    missing = [f.name for f in required(cls) if f.name not in config]
    if unknown or missing:
        raise ValueError(
            f"the config of {cls.__name__} has wrong arguments; missing: {missing or 'none'}, "
            f"unknown: {unknown or 'none'}. Received: config={config!r}"
        )
    return cls(**{k: _decode(v, lookup) for k, v in config.items()})


def required(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return [
        f
        for f in dataclasses.fields(cls)
        if f.init and f.default is missing and f.default_factory is missing
    ]


def _encode(value: Any) -> Any:
    if isinstance(value, Configurable):
        return serialize(value)
    if isinstance(value, dict):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    return checks.to_python(value)


def _decode(value: Any, lookup: Lookup | None) -> Any:
    if isinstance(value, dict) and "class_name" in value:
        return from_config(value, lookup)
    if isinstance(value, list):
        return tuple(_decode(v, lookup) for v in value)
    return value


def imported_only(config: Any, registered: Lookup) -> Any:
    """Return a Keras config after a check that deserializing it imports no module.

    Keras imports the module that a config names, and a file may name any module. It does not import
    the module of a class that it knows by name.

    Args:
        config: The config of a Keras object.
        registered: Returns the class of a name in Keras's registry or `custom_objects`, or `None`.

    Raises:
        ValueError: the program has not imported a module that the config names.
    """
    parts = config.values() if isinstance(config, dict) else config
    module = config.get("module") if isinstance(config, dict) else None
    if isinstance(module, str) and module not in sys.modules and not _known(config, registered):
        raise ValueError(
            "the optimizer's config names a module that the program has not imported. Received: "
            f"module={module!r}, class_name={config.get('class_name')!r}. Pass your own class as "
            "`custom_objects`, or, if you trust the file, import the module before loading the "
            "model."
        )
    if isinstance(config, (dict, list, tuple)):
        for part in parts:
            imported_only(part, registered)
    return config


def _known(config: dict[str, Any], registered: Lookup) -> bool:
    """Return whether Keras knows the class of a config by name; it looks up functions otherwise."""
    name = config.get("registered_name") if config.get("class_name") != "function" else None
    return isinstance(name, str) and registered(name) is not None
