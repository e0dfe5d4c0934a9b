"""How workers' lines are shown: whose they are, in colours on a terminal, without noise."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

_COLOURS = (36, 33, 35, 32, 34, 31)  # of workers in turn: cyan, yellow, magenta, green, blue, red
_BOLD = "1"

# How TensorFlow's C++ begins a line: with its own logging, and with absl's. Lines of absl's logging
# for Python look alike, but for the file: they are the script's.
_LINE = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<own>[IWEF]) "
    rb"|(?P<absl>[IWEF])\d{4} [\d:.]+ +\d+ (?!\S+\.py:\d+\] )"
)
# Warnings and errors that say nothing about this training: linked twice, or no GPU in this machine.
# A GPU that is there and cannot be used is none of them.
_HARMLESS = re.compile(
    rb"Unable to register cu\w+ factory: Attempting to register factory for plugin"
    rb"|computation placer already registered"
    rb"|TF-TRT Warning: Could not find TensorRT"
    rb"|\w+ expects an i value"  # the profiler, of options that it was not given
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
    # The same lines, once absl's logging has taken over the root logger.
    rb"|I\d{4} [\d:.]+ +\d+ (cross_device_ops|mirrored_strategy|collective_all_reduce_strategy"
    rb"|functional_saver)\.py:"
)


def is_noise(line: bytes) -> bool:
    """Whether a line is TensorFlow's, and no one has to read it.

    That is what its C++ logs at the level INFO, and a few warnings and errors that are known.
    Python's lines are never noise, nor is anything of another form.
    """
    found = _LINE.match(line)
    if found is None:
        return _UNLOGGED.match(line) is not None
    level = found["own"] or found["absl"]
    return level == b"I" or (level in b"WE" and _HARMLESS.search(line, found.end()) is not None)


def coloured(stream: IO[Any], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to write colours to a stream: a terminal, unless NO_COLOR (no-color.org) is set."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def paint(text: str, code: str, stream: IO[Any]) -> str:
    """Returns a text in a colour, where the stream shows colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if coloured(stream) else text


def say(text: str) -> None:
    """Prints a line of the launcher's own."""
    print(f"{paint('[launch]', _BOLD, sys.stderr)} {text}", file=sys.stderr, flush=True)


def printer(index: int, has_log: bool, verbose: bool) -> Callable[[bytes], None] | None:
    """Where a worker's complete lines go; `None` for nowhere.

    Args:
        index: Of the worker.
        has_log: Whether there are log files: then worker 0 alone is printed, without a prefix.
        verbose: Whether to print noise too.
    """
    if has_log and index > 0:
        return None
    colour = str(_COLOURS[index % len(_COLOURS)])
    prefix = b"" if has_log else paint(f"[worker {index}]", colour, sys.stdout).encode() + b" "

    def write(lines: bytes) -> None:
        kept = (line for line in lines.splitlines(keepends=True) if verbose or not is_noise(line))
        text = b"".join(prefix + line for line in kept)
        # A text-only replacement of sys.stdout (a notebook, a test) has no byte buffer.
        if hasattr(sys.stdout, "buffer"):
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(text.decode("utf-8", "replace"))
        sys.stdout.flush()

    return write
