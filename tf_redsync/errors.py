"""The base class of errors in distributed training, and texts of error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_MAX_LINES = 16


class DistributedError(RuntimeError):
    """Training on several workers cannot continue.

    Raised by `fit`, `evaluate`, `predict`, every `tf.function`, and `strategy.run`, `reduce` and
    `gather` when a worker is lost or stalled, a message is corrupted, or too many steps were
    skipped. The message names the worker and every worker's step. TensorFlow's own error of the
    step, if any, is the `__cause__`, and its class is a base of this error's class: `except
    tf.errors.UnavailableError` catches it, too.

    Attributes:
        original: TensorFlow's error; `None` if the library found the problem itself.
    """

    original: Exception | None = None


def first_lines(lines: Sequence[str], of: str = "") -> list[str]:
    """Return the first 16 lines of an error, such as one for each worker, and how many follow."""
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"and {more} more{of}"] if more > 0 else [])]


_NODE = re.compile(r"^\{\{function_node .*?\}\} ")
_IN_USER_CODE = re.compile(r"\s+[A-Za-z_][\w.]*(?:Error|Exception|Disagreement): (.+)")
_FIRST_OF_SEVERAL = re.compile(r"^\s*\(0\) [A-Z_]+: +(.+)")  # root errors


def main_line(message: str) -> str:
    """Return the line of a message with the cause, which TensorFlow prints below the stack."""
    lines = message.splitlines() or [""]
    cause = lines[0]
    if cause.startswith("Graph execution error"):
        below = []
        for line in lines[1:]:
            if line.lstrip().startswith("[[{{node"):
                break
            several = _FIRST_OF_SEVERAL.match(line)
            if several:
                below.append(several[1])
                break
            if line and not line[0].isspace() and not line.startswith(("Detected at", "Node:")):
                below.append(line)
        cause = below[-1] if below else cause
    if cause == "in user code:":  # AutoGraph's header of a translated stack
        errors = [match[1] for line in lines if (match := _IN_USER_CODE.match(line))]
        cause = errors[-1] if errors else cause
    return _NODE.sub("", cause)


def uncaught() -> str:
    """Return the uncaught error that ends this program; empty in interactive sessions."""
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return ""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return ""
    message = main_line(str(error))
    kind = type(error).__name__
    return f"{kind}: {message}" if message else kind
