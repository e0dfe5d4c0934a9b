"""A `fit` that is left by an error gives back the signals that a callback has taken over.

Keras does not tell callbacks of an error, and in a notebook the process goes on after it.

Names of Keras used here, all public: the method `fit` of `Model`.
"""

from __future__ import annotations

import functools
from typing import Any

from tf_redsync import stopping


def install(model_class: Any) -> None:
    """Watch how a family's `fit` ends; a second call does nothing.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """
    fit = model_class.fit
    if hasattr(fit, "gives_back"):
        return

    @functools.wraps(fit)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with stopping.given_back_by_errors():
            return fit(self, *args, **kwargs)

    watched.gives_back = True  # type: ignore[attr-defined]
    model_class.fit = watched
