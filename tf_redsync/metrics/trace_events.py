"""Events of TensorFlow's profiler, read without the profiler's TensorBoard plugin.

TensorFlow writes an `.xplane.pb` with planes (the host), lines (threads) and events. An op is an
event called "name:Type"; the event of a collective ends with its result. A step is an event of
`tf.profiler.experimental.Trace`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Span = tuple[float, float]  # microseconds

_OP = re.compile(r"(?P<name>[^:\s]+):_?(?P<type>[A-Za-z]\w*)")
# Ops that contain other ops, which have events of their own.
_CALLS = re.compile(r"(Stateless|Stateful)?(If|While|Case|PartitionedCall)|XlaLaunch|MapDefun")


@dataclasses.dataclass(frozen=True)
class Event:
    """An op or a step.

    Attributes:
        name: Name of the op in the graph, or of the step.
        type: Type of the op; "" for a step.
        start: Start in microseconds; all events have the same origin.
        end: End in microseconds.
        thread: Name of the thread.
    """

    name: str
    type: str
    start: float
    end: float
    thread: str


def read(folder: str | Path) -> Any:
    """Return the profile (an XSpace) in a folder or its subfolders.

    Raises:
        FileNotFoundError: there is no profile.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    paths = sorted(Path(folder).rglob("*.xplane.pb"))
    if not paths:
        raise FileNotFoundError(f"the profiler has written no .xplane.pb below {folder}")
    space = xplane_pb2.XSpace()
    space.ParseFromString(paths[-1].read_bytes())
    return space


def host_events(space: Any, step_name: str) -> tuple[list[Event], list[Event]]:
    """Return the steps and the ops of a profile's host, each in the order of their starts."""
    steps, ops = [], []
    for plane in space.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        parsed = {key: _op(name) for key, name in names.items()}
        for line in plane.lines:
            for event in line.events:
                name, op = names[event.metadata_id], parsed[event.metadata_id]
                if name != step_name and op is None:
                    continue
                start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                end = start + event.duration_ps / 1e6
                if name == step_name:
                    steps.append(Event(name, "", start, end, line.name))
                elif op is not None:
                    ops.append(Event(*op, start, end, line.name))
    by_start = lambda event: event.start  # noqa: E731
    return sorted(steps, key=by_start), sorted(ops, key=by_start)


def _op(name: str) -> tuple[str, str] | None:
    """Return name and type of an event's op; `None` if it is no op or contains other ops."""
    match = _OP.fullmatch(name)
    if match is None or _CALLS.fullmatch(match["type"]):
        return None
    return match["name"], match["type"]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans as disjoint spans in ascending order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the sum of the lengths of spans."""
    return sum(end - start for start, end in spans)
