"""Errors of a step in the library's own words, with TensorFlow's error as their cause.

What fails inside of a step comes out of TensorFlow as "Graph execution error", with the stack of
the graph before the reason. And where a worker is lost, TensorFlow knows a socket. So a call of a
step raises a `DistributedError` in its place: with the watchdog's verdict for a lost worker, with
the text alone for what the library itself has raised in the step. Other errors pass unchanged.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import watchdog
from tf_redsync.error_texts import main_line
from tf_redsync.errors import DistributedError

# By which a collective ends when it is aborted, or when the process of another worker is gone.
_OF_COLLECTIVES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
# Of checks in the graph.
_OF_CHECKS = ("arrived changed", "traced before compression was switched")
_ASSERTED = re.compile(r"\[(.*?)\]")
_MARK = "in_words_of_tf_redsync"


def install() -> None:
    """Let every `tf.function` raise errors in these words; a second call does nothing.

    A custom loop calls its step as a `tf.function`, and nothing of the library's is around that.
    """
    kind = type(tf.function(lambda: None))
    call = kind.__call__
    if hasattr(call, _MARK):
        return

    @functools.wraps(call)
    def in_words(self: Any, *args: Any, **kwargs: Any) -> Any:
        with translated():
            return call(self, *args, **kwargs)

    setattr(in_words, _MARK, True)
    kind.__call__ = in_words


class translated:  # noqa: N801  # in every call of a function: a generator would cost more
    """A context that raises errors of a step in these words."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, tf.errors.OpError):
            found = in_our_words(error)
            if found is not None:
                raise found from error


def in_our_words(error: tf.errors.OpError) -> DistributedError | None:
    """Return the error to raise in the place of one of TensorFlow's; `None` to leave it.

    Where a collective has failed, waits some seconds until it is known which worker is lost.
    """
    if isinstance(error, DistributedError):
        return None
    if isinstance(error, _OF_COLLECTIVES):
        found = watchdog.verdict_after_loss()
        if found is not None:
            return _made(DistributedError, found, error)
    for kind in _kinds(DistributedError):  # raised by a `py_function`
        raised = re.search(rf"(?:^|[ .]){kind.__name__}: (.+)", error.message, re.MULTILINE)
        if raised:
            return _made(kind, raised[1], error)
    text = main_line(error.message)
    if any(words in text for words in _OF_CHECKS):
        return _made(DistributedError, _without_assertion(text), error)
    return None


def _kinds(kind: type[DistributedError]) -> Iterator[type[DistributedError]]:
    for below in kind.__subclasses__():
        if not issubclass(below, tf.errors.OpError):
            yield below
            yield from _kinds(below)


def _without_assertion(text: str) -> str:
    """Take the text of `tf.debugging.Assert` out of what TensorFlow makes of it."""
    if not text.startswith("assertion failed: "):
        return text
    said = itertools.takewhile(lambda s: not s.startswith("Condition "), _ASSERTED.findall(text))
    return " ".join(said)


def _made(kind: type[DistributedError], text: str, error: tf.errors.OpError) -> DistributedError:
    """Return an error of `kind` that is also one of TensorFlow's class."""
    made = _again(kind, type(error), text, error.error_code)
    made.original = error
    return made


def _again(
    kind: type[DistributedError], theirs: type[tf.errors.OpError], text: str, code: int
) -> DistributedError:
    """Return an error without a cause, as `pickle` asks for it."""
    arguments = kind, theirs, text, code
    own = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce__": lambda self: (_again, arguments),
    }
    both: Any = type(kind.__name__, (theirs, kind), own)
    made = both.__new__(both)
    tf.errors.OpError.__init__(made, None, None, text, code)
    return made
