"""What a method of a model does that is left by an error.

`fit` gives back the signals that a callback has taken over: Keras does not tell callbacks of an
error, and in a notebook the process goes on after it. And Keras takes the cause from every error
that passes through it, so it is given back as well.

Names of Keras used here, all public: the methods `fit`, `evaluate` and `predict` of `Model`.
"""

from __future__ import annotations

from typing import Any

from tf_redsync import stopping
from tf_redsync.errors import DistributedError
from tf_redsync.keras import replacing


def install(model_class: Any) -> None:
    """Watch how a family's methods end; a second call does nothing.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """

    def watching(method: Any) -> Any:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with stopping.given_back_by_errors():
                    return method(self, *args, **kwargs)
            except DistributedError as error:
                if error.original is None:
                    raise
                raise error from error.original

        return watched

    for name in ("fit", "evaluate", "predict"):
        replacing.once(model_class, name, watching)
