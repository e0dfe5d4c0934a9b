"""Which worker of a job failed first, and why: read from what the workers printed.

When one fails, the others fail of it, some before the first one has ended. What tells them apart is
their last traceback: when it began, and whether it is of an error that TensorFlow or the watchdog
raise because another worker is gone.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from tf_redsync.errors import main_line

TRACEBACK = "Traceback (most recent call last):"
_MAX_TEXT = 300
_PACKAGE = str(Path(__file__).resolve().parents[1])
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)')
_ERROR = re.compile(r"^([A-Za-z_][\w.<>]*)(?:: (.*))?$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|__autograph_generated_file")
# Errors of TensorFlow at workers whose peer went away, and what the watchdog says of such.
_VICTIMS = ("AbortedError", "UnavailableError", "CancelledError", "DeadlineExceededError")
_OF_VICTIMS = re.compile(
    r"worker \d+ has failed: |has ended its program, and worker|does not answer: its process"
    r"|did not reach the others within"
    r"|[Cc]ollective ops is aborted|[Cc]oordination service|heartbeat|[Ss]ocket closed"
    r"|[Cc]onnection (?:reset|refused)|failed to connect to all addresses"
    r"|some workers did not start within"
)


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended.

    Attributes:
        index: Of the worker.
        returncode: `-s` for a signal.
        output: Its last lines.
        failed_at: When it printed its last traceback, or else ended, on any clock of the launcher.
    """

    index: int
    returncode: int
    output: str
    failed_at: float


def first(ends: Sequence[End]) -> tuple[int, str] | None:
    """Return which worker failed first, and a line that says why.

    Args:
        ends: Of the workers that failed by themselves.

    Returns:
        The worker's index and the line; `None` without workers.
    """
    if not ends:
        return None
    causes = {end.index: _cause(end) for end in ends}
    # What happened to a worker comes before what it had to say of another one.
    by_time = sorted(ends, key=lambda end: (causes[end.index][1], end.failed_at))
    index, text = by_time[0].index, causes[by_time[0].index][0]
    alike = sorted(end.index for end in ends if causes[end.index][0] == text)
    if len(alike) > 1:
        return index, f"workers {', '.join(map(str, alike))} failed alike: {text}"
    return index, f"worker {index} failed first: {text}"


def _cause(end: End) -> tuple[str, bool]:
    """Return why a worker ended, and whether that is because of another one."""
    lines = end.output.splitlines()
    if end.returncode < 0:
        name = signal.Signals(-end.returncode).name
        hint = ", perhaps for want of memory" if -end.returncode == signal.SIGKILL else ""
        return f"ended by {name}{hint}", False
    starts = [number for number, line in enumerate(lines) if line.strip() == TRACEBACK]
    found = _of_traceback(lines[starts[-1] + 1 :]) if starts else None
    if found is None:
        last = next((line for line in reversed(lines) if line.strip()), "(no output)")
        return f"exit code {end.returncode}; its last line: {_short(last)}", False
    kind, message, place = found
    victim = kind in _VICTIMS or _OF_VICTIMS.search(message) is not None
    text = f"{kind}: {_short(message)}" if message else kind
    return f"{text} ({place})" if place else text, victim


def _of_traceback(lines: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the error's class, its message and where in the user's program it was raised."""
    places = []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame:
            places.append((frame[1], frame[2]))
        elif line and not line[0].isspace():
            error = _ERROR.match(line)
            if error is None:
                return None
            message = "\n".join([error[2] or "", *lines[number + 1 :]])
            return error[1].rpartition(".")[2], main_line(message), _place(places)
    return None


def _place(places: Sequence[tuple[str, str]]) -> str:
    if not places:
        return ""
    own = [p for p in places if not _LIBRARY.search(p[0]) and not p[0].startswith(_PACKAGE)]
    file, line = (own or places)[-1]
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}:{line}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
