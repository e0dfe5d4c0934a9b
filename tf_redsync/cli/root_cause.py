"""Root cause of a failed job: finds the worker that failed first in the workers' output.

A failing worker makes the others fail, some of them before its own process has ended. Two
properties of the last traceback separate cause from consequence: its time, and whether its error
is one that TensorFlow or the watchdog raises because another worker is lost.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tf_redsync.errors import main_line

TRACEBACK = "Traceback (most recent call last):"
_MAX_TEXT = 300
_PACKAGE = str(Path(__file__).resolve().parents[1])
_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # in tracebacks of Python 3.13 with FORCE_COLOR
# Errors in destructors and exit handlers do not end a program.
_BLOCK = re.escape(TRACEBACK) + r"\n(?:[ \t].*\n)*.*"
_CHAINED = rf"\n\n(?:During handling|The above exception) .*\n\n{_BLOCK}"
_IGNORED = re.compile(rf"Exception ignored .*\n{_BLOCK}(?:{_CHAINED})*\n?")
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)')
_ERROR = re.compile(r"^([A-Za-z_][\w.<>]*)(?:: (.*))?$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|__autograph_generated_file")
# Errors that TensorFlow and the watchdog raise in workers whose peer is lost.
_VICTIMS = ("AbortedError", "UnavailableError", "CancelledError", "DeadlineExceededError")
_OF_VICTIMS = re.compile(
    r"worker \d+ has failed: |has ended its program, and worker|does not answer: its process"
    r"|did not reach the others within"
    r"|[Cc]ollective ops is aborted|[Cc]oordination service|heartbeat|[Ss]ocket closed"
    r"|[Cc]onnection (?:reset|refused)|failed to connect to all addresses"
    r"|some workers did not start within"
)
_OF_WORKER = re.compile(r"worker \d+(?:, \d+)*:? ")
_UNPARSED = re.compile(r"^(?:Syntax|Indentation|Tab)Error: ", re.MULTILINE)
# Python's errors for an import of an unexpected module of the same name.
_UNEXPECTED_MODULE = re.compile(
    r"module '(\w+)'.* has no attribute|cannot import name '\w+' from .*'(\w+)'"
    r"|'(\w+)' is not a package"
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that failed.

    Attributes:
        index: Rank of the worker.
        returncode: Exit code; `-s` if signal `s` ended the worker.
        output: Its last lines.
        failed_at: Time of its last traceback, or of its end without one, in seconds.
    """

    index: int
    returncode: int
    output: str
    failed_at: float


def first_failure(ends: Sequence[Failure]) -> tuple[int, str] | None:
    """Return the worker that failed first and a line with the cause.

    Args:
        ends: All failed workers, except those that the launcher ended.

    Returns:
        The worker's rank and the line; `None` if `ends` is empty.
    """
    if not ends:
        return None
    causes = {end.index: _cause(end) for end in ends}
    # A worker's own error precedes errors about another worker, whatever their times.
    by_time = sorted(ends, key=lambda end: (causes[end.index][1], end.failed_at))
    index, text = by_time[0].index, causes[by_time[0].index][0]
    alike = sorted(end.index for end in ends if causes[end.index][0] == text)
    if len(alike) > 1:
        return index, f"workers {', '.join(map(str, alike))} failed with the same error: {text}"
    return index, f"worker {index} failed first: {text}"


def place(output: str) -> str:
    """Return the line of the user's program in the last traceback of a worker; "" without one."""
    error = _parse_traceback(plain(output).rpartition(f"{TRACEBACK}\n")[2].splitlines())
    return error[2] if error else ""


def plain(output: str) -> str:
    """Return a worker's output without colors and without exceptions that Python ignored."""
    return _IGNORED.sub("", _COLOR.sub("", output))


def blames_another(cause: str) -> bool:
    """Return whether a line of `first_failure` names an error that another worker caused."""
    return any(f": {kind}" in cause for kind in _VICTIMS) or _OF_VICTIMS.search(cause) is not None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM; of a real-time signal, its number."""
    named = number in set(signal.Signals)
    return signal.Signals(number).name if named else f"signal {number}"


def _cause(end: Failure) -> tuple[str, bool]:
    """Return a worker's error, and whether another worker caused it."""
    output = plain(end.output)
    lines = output.splitlines()
    if end.returncode < 0:
        name = signal_name(-end.returncode)
        hint = ", possibly out of memory" if -end.returncode == signal.SIGKILL else ""
        return f"ended by {name}{hint}", False
    # A progress bar may precede it in its line.
    starts = [i + 1 for i, line in enumerate(lines) if line.rstrip().endswith(TRACEBACK)]
    if not starts and _UNPARSED.search(output):  # a syntax error in the script itself
        starts = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    error = _parse_traceback(lines[starts[-1] :]) if starts else None
    if error is None:
        last = next((line for line in reversed(lines) if line.strip()), "(no output)")
        return f"exit code {end.returncode}; its last line: {_short(last)}", False
    kind, message, place, folder = error
    victim = kind in _VICTIMS or _OF_VICTIMS.search(message) is not None
    text = f"{kind}: {_short(message)}" if message else kind
    text = f"{text} ({place})" if place else text
    return text + _shadowing_hint(message, folder), victim


def _parse_traceback(lines: Sequence[str]) -> tuple[str, str, str, str] | None:
    """Return the error's class, its message, its line in the user's program, and the folder."""
    places = []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame:
            places.append((frame[1], frame[2]))
        elif line and not line[0].isspace():
            error = _ERROR.match(line)
            if error is None and not line.strip("^~"):  # position marks without an indent
                continue
            if error is None:
                return None
            message = "\n".join([error[2] or "", *lines[number + 1 :]])
            kind = error[1].rpartition(".")[2]
            return kind, _with_workers(message), _place(places), _folder(places)
    return None


def _with_workers(message: str) -> str:
    """Return the main line of a message, with the lines of workers that it announces."""
    line = main_line(message)
    if not line.endswith(":"):
        return line
    workers = [below for below in message.splitlines()[1:] if _OF_WORKER.match(below)]
    return f"{line} {'; '.join(workers)}" if workers else line


def _user_frames(places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the frames of the user's program."""
    return [p for p in places if not _LIBRARY.search(p[0]) and not p[0].startswith(_PACKAGE)]


def _place(places: Sequence[tuple[str, str]]) -> str:
    if not places:
        return ""
    file, line = (_user_frames(places) or places)[-1]
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}:{line}"


def _folder(places: Sequence[tuple[str, str]]) -> str:
    """Return the folder of the script, where Python looks first for modules."""
    user_places = _user_frames(places)
    return os.path.dirname(os.path.abspath(user_places[0][0])) if user_places else os.getcwd()


def _shadowing_hint(message: str, folder: str) -> str:
    """Return a hint if an error comes from a file beside the script that hides a module."""
    match = _UNEXPECTED_MODULE.search(message)
    name = next(filter(None, match.groups()), "") if match else ""
    file = os.path.join(folder, f"{name}.py")
    if not name or not os.path.exists(file):
        return ""
    elsewhere = [entry for entry in sys.path if "-packages" in entry]
    known = name in sys.stdlib_module_names or name == os.path.basename(_PACKAGE)
    if not known and importlib.machinery.PathFinder.find_spec(name, elsewhere) is None:
        return ""
    return f". {file} hides the module {name!r}: rename the file"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
