"""Output of the workers: prefixes, colors, log files, and the filter for TensorFlow's log noise."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

_COLORS = (36, 33, 35, 32, 34, 31)  # by worker: cyan, yellow, magenta, green, blue, red
_BOLD = "1"
# A full disk or broken pipe; a closed stream; a descriptor that was closed at the start.
_UNWRITABLE = (OSError, ValueError, AttributeError)

# The beginning of a log line of TensorFlow's C++ code, in its own format and in absl's. Lines of
# absl's Python logging differ by the file name only; they belong to the script.
_LINE = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<own>[IWEF]) "
    rb"|(?P<absl>[IWEF])\d{4} [\d:.]+ +\d+ (?!\S+\.py:\d+\] )"
)
# Warnings and errors that are irrelevant to the training: duplicate registrations, no GPU in this
# machine. The list excludes errors about an existing GPU that cannot be used.
_HARMLESS = re.compile(
    rb"Unable to register cu\w+ factory: Attempting to register factory for plugin"
    rb"|computation placer already registered"
    rb"|TF-TRT Warning: Could not find TensorRT"
    rb"|\w+ expects an i value"  # the profiler, about options that have defaults
    rb"|Input of \w+::Dataset will not be optimized because the dataset does not implement"
    rb"|failed call to cuInit: .*(?:NO_DEVICE|UNKNOWN ERROR \(303\))"
)
_UNLOGGED = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|To enable the following instructions: .* rebuild TensorFlow with the appropriate"
    rb"|/job:\w+/replica:\d+/task:\d+\s*$"  # the second line of "Example stragglers:"
    rb"|INFO:tensorflow:(Enabled multi-worker collective ops|Using MirroredStrategy with devices"
    rb"|Check health not enabled|MultiWorkerMirroredStrategy with cluster_spec"
    rb"|Collective \w+( tensors)?: \d+ |Sharding callback duration)"
    # The same lines after absl's logging has replaced the root logger's handlers.
    rb"|I\d{4} [\d:.]+ +\d+ (cross_device_ops|mirrored_strategy|collective_all_reduce_strategy"
    rb"|functional_saver)\.py:"
)

# A progress bar may precede a traceback in its line.
_ERROR = re.compile(
    rb".*Traceback \(most recent call last\):\s*$|worker \d+ (?:has failed|has ended)"
)


def is_noise(line: bytes) -> bool:
    """Return whether a line is log noise of TensorFlow.

    Noise is everything that its C++ code logs at level INFO, and known harmless warnings and
    errors. All other lines, including those of Python code, are kept.
    """
    match = _LINE.match(line)
    if match is None:
        return _UNLOGGED.match(line) is not None
    level = match["own"] or match["absl"]
    return level == b"I" or (level in b"WE" and _HARMLESS.search(line, match.end()) is not None)


def is_error(line: bytes) -> bool:
    """Return whether a line begins a traceback or an error message of TensorFlow or a watchdog."""
    match = _LINE.match(line)
    if match is not None:
        return (match["own"] or match["absl"]) != b"I"
    return _ERROR.match(line) is not None


def is_colored(stream: IO[Any], environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream is a terminal without NO_COLOR (https://no-color.org)."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def paint(text: str, code: str, stream: IO[Any]) -> str:
    """Return the text, with ANSI color `code` if the stream shows colors."""
    return f"\x1b[{code}m{text}\x1b[0m" if is_colored(stream) else text


def say(text: str) -> None:
    """Print a message of the launcher; a no-op if standard error cannot be written."""
    with contextlib.suppress(*_UNWRITABLE):
        # A single write, so that lines of two threads do not mix.
        sys.stderr.write(f"{paint('[launch]', _BOLD, sys.stderr)} {text}\n")
        sys.stderr.flush()


def _stop_printing(error: Exception) -> None:
    """Discard all later output, because standard output cannot be written."""
    say(f"standard output cannot be written and ends here: {error}. The workers go on.")
    if isinstance(error, OSError):  # flushing the remaining buffer would fail again
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    else:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # to the end


def printer(index: int, has_log: bool, verbose: bool) -> Callable[[bytes], None] | None:
    """Return a function that prints complete lines of a worker; `None` to print nothing.

    Args:
        index: Rank of the worker.
        has_log: Whether there are log files. Then only worker 0 is printed, without a prefix.
        verbose: Whether to print TensorFlow's log noise, too.
    """
    if has_log and index > 0:
        return None
    color = str(_COLORS[index % len(_COLORS)])
    prefix = b"" if has_log else paint(f"[worker {index}]", color, sys.stdout).encode() + b" "

    def write(lines: bytes) -> None:
        shown = (line for line in lines.splitlines(keepends=True) if verbose or not is_noise(line))
        text = b"".join(prefix + line for line in shown)
        try:
            # In a notebook or test, sys.stdout may be a text stream without a byte buffer.
            if hasattr(sys.stdout, "buffer"):
                sys.stdout.buffer.write(text)
            else:
                sys.stdout.write(text.decode("utf-8", "replace"))
            sys.stdout.flush()
        except _UNWRITABLE as error:
            _stop_printing(error)

    return write


@dataclasses.dataclass(frozen=True)
class Output:
    """Destination of the workers' output: log files, the terminal, or both.

    Attributes:
        logs: Folder of the log files; `None` for none.
        echo: Whether to print complete lines.
        verbose: Whether to print TensorFlow's log noise, too.
        stream: Function that gets the output of worker 0 as it arrives.
    """

    logs: Path | None
    echo: bool
    verbose: bool
    stream: Callable[[bytes], None] | None = None

    def log(self, number: int) -> Path | None:
        """Return the log file of a worker, if there are log files."""
        return self.logs / f"worker_{number}.log" if self.logs else None

    def printer(self, number: int) -> Callable[[bytes], None] | None:
        """Return a function that prints lines of a worker, or `None`."""
        return printer(number, bool(self.logs), self.verbose) if self.echo else None
