"""Methods of Keras's classes that the library takes part in, each replaced once in a process.

Keras tells an optimizer nothing of epochs, of errors, of compiling and saving. `install` is called
where the library is imported, for each of the two Keras libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "replaced_by_tf_redsync"


def once(model_class: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a method by one around it, if there is such a method; a second call does nothing.

    It is replaced in the class that defines it: Keras 3 takes any other for a user's own.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
        name: Of the method.
        around: Gets the method and returns the new one.
    """
    owner = next((c for c in model_class.__mro__ if name in vars(c)), None)
    if owner is None:
        return
    method = getattr(owner, name)
    if not hasattr(method, _MARK):
        replaced = functools.wraps(method)(around(method))
        setattr(replaced, _MARK, True)
        setattr(owner, name, replaced)
