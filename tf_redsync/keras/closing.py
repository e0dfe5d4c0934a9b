"""Closes callbacks, with their files, threads and signal handlers, when `fit` raises.

Keras does not call `on_train_end` after an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_open: list[Any] = []  # callbacks of all models in `fit`


def register(callback: Any) -> None:
    """Register a callback, whose `close()` is called if the `fit` of its model raises.

    `close` is public, so that a loop without `fit` can call it, too.
    """
    if callback not in _open:
        _open.append(callback)


def unregister(callback: Any) -> None:
    """Unregister a callback; its `close` calls this."""
    if callback in _open:
        _open.remove(callback)


@contextlib.contextmanager
def closing_on_error(model: Any) -> Iterator[None]:
    """Context that closes a model's callbacks registered within it if it raises."""
    before = list(_open)
    try:
        yield
    except BaseException:
        with contextlib.ExitStack() as stack:  # closes all, even if one raises
            for callback in _open:
                if callback not in before and callback.model is model:
                    stack.callback(callback.close)
        raise
