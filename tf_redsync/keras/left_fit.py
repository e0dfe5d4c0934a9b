"""A `fit` that is left by an error gives back the signals that a callback has taken over.

Keras does not tell callbacks of an error, and in a notebook the process goes on after it.

Names of Keras used here, all public: the method `fit` of `Model`.
"""

from __future__ import annotations

from typing import Any

from tf_redsync import stopping
from tf_redsync.keras import replacing


def install(model_class: Any) -> None:
    """Watch how a family's `fit` ends; a second call does nothing.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """

    def watching(fit: Any) -> Any:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            with stopping.given_back_by_errors():
                return fit(self, *args, **kwargs)

        return watched

    replacing.once(model_class, "fit", watching)
