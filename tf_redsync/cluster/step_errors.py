"""Translates TensorFlow's errors of a step into `DistributedError`, with the original as cause.

TensorFlow reports a failure in a step as "Graph execution error", with the graph's stack before the
reason. For a lost worker, the reason is only a socket error. So a step raises a `DistributedError`
instead: with the watchdog's verdict for a lost worker, or with the plain message of an error that
this library has raised in the step. Other errors pass unchanged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import watchdog
from tf_redsync.errors import DistributedError, main_line
from tf_redsync.patching import patch_once

# Errors of a collective that is aborted, or whose peer has died.
_OF_COLLECTIVES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
STALE_STEP = (
    "this step was traced before compression was disabled or enabled. Create a new `tf.function` "
    "of the step after `optimizer.disable()` or `optimizer.enable()`, also of a decorated function "
    "that is passed to `strategy.run`."
)
# Messages of this library's assertions in the graph.
_OF_CHECKS = ("received a corrupted message", STALE_STEP)
IN_BACKGROUND = "an exchange in the background failed:"
_in_background: list[Exception] = []  # the last failure of a background thread
_ASSERTED = re.compile(r"\[(.*?)\]")


def install() -> None:
    """Translate the errors of every `tf.function`; a second call is a no-op.

    A custom loop calls its step as a `tf.function`, so no code of this library surrounds the call.
    """

    def translating(call: Callable[..., Any]) -> Callable[..., Any]:
        def translated_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with translated():
                return call(self, *args, **kwargs)

        return translated_call

    patch_once(type(tf.function(lambda: None)), "__call__", translating)


class translated:  # noqa: N801  # a class, because a generator would cost more per call
    """Context that translates the errors of a step."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, tf.errors.OpError):
            replacement = library_error(error)
            if replacement is not None:
                raise replacement from error


def fail_in_background(error: Exception) -> str:
    """Store the error of a thread for the step that waits for the thread; return its reason."""
    _in_background[:] = [error]
    return main_line(str(error))


def library_error(error: tf.errors.OpError) -> Exception | None:
    """Return the error to raise instead of TensorFlow's; `None` to leave it unchanged.

    After a failed collective, it waits some seconds for the watchdog to find the lost worker.
    """
    if isinstance(error, DistributedError):
        return None
    if _in_background and _follows_background_failure(error):
        return _in_background[0]
    if isinstance(error, _OF_COLLECTIVES):
        verdict = watchdog.verdict_after_loss()
        if verdict is not None:
            return _combined_error(DistributedError, verdict, error)
    for kind in _kinds(DistributedError):  # raised by a `py_function`
        raised = re.search(rf"(?:^|[ .]){kind.__name__}: (.+)", error.message, re.MULTILINE)
        if raised:
            return _combined_error(kind, raised[1], error)
    text = main_line(error.message)
    if any(words in text for words in _OF_CHECKS):
        return _combined_error(DistributedError, _without_assertion(text), error)
    return None


def _follows_background_failure(error: tf.errors.OpError) -> bool:
    """Return whether a failure in the background may be the cause; the end of data is not."""
    if isinstance(error, tf.errors.OutOfRangeError):
        return "Queue" in error.message and "is closed" in error.message
    return IN_BACKGROUND in error.message or isinstance(error, tf.errors.CancelledError)


def _kinds(kind: type[DistributedError]) -> Iterator[type[DistributedError]]:
    for below in kind.__subclasses__():
        if not issubclass(below, tf.errors.OpError):
            yield below
            yield from _kinds(below)


def _without_assertion(text: str) -> str:
    """Extract the message of `tf.debugging.Assert` from TensorFlow's text."""
    if not text.startswith("assertion failed: "):
        return text
    words = itertools.takewhile(lambda s: not s.startswith("Condition "), _ASSERTED.findall(text))
    return " ".join(words)


def _combined_error(
    kind: type[DistributedError], text: str, error: tf.errors.OpError
) -> DistributedError:
    """Return an error of `kind` that is also an instance of TensorFlow's class."""
    made = _build(kind, type(error), text, error.error_code)
    made.original = error
    return made


def _build(
    kind: type[DistributedError], theirs: type[tf.errors.OpError], text: str, code: int
) -> DistributedError:
    """Return an error without a cause; `pickle` calls this again to restore it."""
    arguments = kind, theirs, text, code
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce__": lambda self: (_build, arguments),
    }
    both: Any = type(kind.__name__, (theirs, kind), members)
    made = both.__new__(both)
    tf.errors.OpError.__init__(made, None, None, text, code)
    return made
