"""Patches functions of TensorFlow and Keras, each at most once.

A patch needs a private or public name of a library that offers no hook at that point. It is
installed when the package is imported or a strategy starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MARK = "patched_by_tf_redsync"


def patch_once(
    owner: type | ModuleType, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function by a wrapper of it; a no-op if it is missing or already replaced.

    A method is replaced in the class that defines it, because Keras 3 would take a method of
    another class for a user's override.

    Args:
        owner: The class, or a subclass of the class that defines the method, or the module.
        name: Name of the method or function.
        around: Takes the original function and returns its replacement.
    """
    places = owner.__mro__ if isinstance(owner, type) else (owner,)
    place = next((p for p in places if name in vars(p)), None)
    if place is None:
        return
    original = getattr(place, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.wraps(original)(around(original))
    setattr(replacement, _MARK, True)
    setattr(place, name, replacement)
