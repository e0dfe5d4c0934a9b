"""Frozen dataclasses that turn into JSON and back: methods, policies, schedules."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np

_REGISTRY: dict[str, type] = {}
_T = TypeVar("_T")


def register(cls: type[_T]) -> type[_T]:
    """Class decorator: make a frozen dataclass known to `from_config`."""
    _REGISTRY[cls.__name__] = cls
    return cls


def registered() -> dict[str, type]:
    """Return all registered classes by name."""
    return dict(_REGISTRY)


class Configurable:
    """Config round trip for frozen dataclasses of plain values and of each other."""

    def get_config(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict from which `from_config` makes an equal object."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"class_name": type(self).__name__, "config": _encode(values)}


def from_config(config: dict[str, Any]) -> Any:
    """Rebuild what `get_config` described.

    Raises:
        ValueError: when the class is unknown.
    """
    name = config.get("class_name")
    if name not in _REGISTRY:
        raise ValueError(
            f"`class_name` must be one of {sorted(_REGISTRY)}. Received: class_name={name!r}"
        )
    return _REGISTRY[name](**{k: _decode(v) for k, v in config["config"].items()})


def _encode(value: Any) -> Any:
    if isinstance(value, Configurable):
        return value.get_config()
    if isinstance(value, dict):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and "class_name" in value:
        return from_config(value)
    if isinstance(value, list):
        return tuple(_decode(v) for v in value)
    return value
