"""What an error says, in one line: for the texts about several workers."""

from __future__ import annotations

import re

_NODE = re.compile(r"^\{\{function_node .*?\}\} ")


def main_line(message: str) -> str:
    """Return the line of a message that says most; TensorFlow puts it below the graph's stack."""
    lines = message.splitlines() or [""]
    found = lines[0]
    if found.startswith("Graph execution error"):
        below = []
        for line in lines[1:]:
            if line.lstrip().startswith("[[{{node"):
                break
            if line and not line[0].isspace() and not line.startswith(("Detected at", "Node:")):
                below.append(line)
        found = below[-1] if below else found
    return _NODE.sub("", found)
