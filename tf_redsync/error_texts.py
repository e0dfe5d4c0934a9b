"""What an error says, in one line: for the texts about several workers."""

from __future__ import annotations

import re
import sys

_NODE = re.compile(r"^\{\{function_node .*?\}\} ")
_FIRST_OF_SEVERAL = re.compile(r"^\s*\(0\) [A-Z_]+: +(.+)")  # root errors


def main_line(message: str) -> str:
    """Return the line of a message that says most; TensorFlow puts it below the graph's stack."""
    lines = message.splitlines() or [""]
    found = lines[0]
    if found.startswith("Graph execution error"):
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
        found = below[-1] if below else found
    return _NODE.sub("", found)


def uncaught() -> str:
    """By which error this program ends, which is over; in a session with a user, none does."""
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return ""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return ""
    message = main_line(str(error))
    kind = type(error).__name__
    return f"{kind}: {message}" if message else kind
