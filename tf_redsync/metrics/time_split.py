"""Where the time of a step goes, from a short profile of a few steps.

TensorFlow's profiler records the ops of this process on the CPU; their types and names tell what
they are for (`driver.SELECTING`, `DECODING`). `profiler.py` makes the profile.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tf_redsync.exchange.driver import DECODING, SELECTING

STEP = "tf_redsync_step"
_OP = re.compile(r"(?P<name>[^:\s]+):_?(?P<type>[A-Za-z]\w*)")
# They hold other ops, which have events of their own.
_CALLS = re.compile(r"(Stateless|Stateful)?(If|While|Case|PartitionedCall)|XlaLaunch|MapDefun")
_INPUT = re.compile(r"IteratorGetNext(AsOptional|Sync)?|OptionalGetValue")
_SELECT = re.compile(r"Redsync(AccumulateAndSelect|Quantize|GolombEncode|BloomBuild)")
_DECODE = re.compile(r"Redsync(Decode|DequantizeSum|GolombDecode|BloomQuery|SparseMerge)")

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Split:
    """Milliseconds a step; all but `exchange` add up to `step`.

    Attributes:
        compute: Ops of the model and the optimizer ran: forward, backward, update.
        select: Ops that make what is sent.
        decode: Ops that make sums of what was received.
        input: The step waited for its batch.
        wait: None of these ran: only collectives, or nothing.
        exchange: Collectives were under way, beside whatever else.
        step: All of it.
    """

    compute: float
    select: float
    decode: float
    input: float
    wait: float
    exchange: float
    step: float


class NoProfile(RuntimeError):
    """The steps could not be recorded, for a reason that the text says."""


def read(folder: str | Path) -> Any:
    """Return the profile (an XSpace) that lies below a folder.

    Raises:
        NoProfile: if there is none.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    paths = sorted(Path(folder).rglob("*.xplane.pb"))
    if not paths:
        raise NoProfile("TensorFlow's profiler has written no .xplane.pb")
    space = xplane_pb2.XSpace()
    space.ParseFromString(paths[-1].read_bytes())
    return space


def split_of(space: Any, steps: int) -> Split:
    """Return what the time of the recorded steps went into: the mean of them.

    Args:
        space: From `read`.
        steps: How many training steps each recorded one stands for.

    Raises:
        NoProfile: if no step was recorded whole.
    """
    recorded, lanes = _events(space)
    if not recorded:
        raise NoProfile("TensorFlow's profile has no whole step")
    parts = [_parts(step, lanes) for step in recorded]
    per = 1e3 * len(parts) * steps  # of microseconds, to milliseconds a step
    return Split(**{f.name: sum(p[f.name] for p in parts) / per for f in dataclasses.fields(Split)})


def lane(name: str, kind: str) -> str:
    """Return what an op is for: the name of a field of `Split`."""
    if kind.startswith("Collective"):
        return "exchange"
    if _INPUT.fullmatch(kind):
        return "input"
    if _SELECT.fullmatch(kind) or SELECTING in name:
        return "select"
    if _DECODE.fullmatch(kind) or DECODING in name:
        return "decode"
    return "compute"


def _events(space: Any) -> tuple[list[Span], dict[str, list[Span]]]:
    """Return the steps, and the ops by their lanes; microseconds."""
    steps: list[Span] = []
    lanes: dict[str, list[Span]] = {f.name: [] for f in dataclasses.fields(Split)}
    for plane in space.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        kinds = {key: _kind(metadata.name) for key, metadata in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                kind = kinds[event.metadata_id]
                if kind is None:
                    continue
                start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                span = (start, start + event.duration_ps / 1e6)
                (steps if kind == STEP else lanes[kind]).append(span)
    return sorted(steps), {kind: union(spans) for kind, spans in lanes.items()}


def _kind(name: str) -> str | None:
    if name == STEP:
        return STEP
    found = _OP.fullmatch(name)
    if found is None or _CALLS.fullmatch(found["type"]):
        return None
    return lane(found["name"], found["type"])


def _parts(step: Span, lanes: dict[str, list[Span]]) -> dict[str, float]:
    """Share out a step. Where ops of several kinds run at once, the first one below counts."""
    inside = {kind: within(step, spans) for kind, spans in lanes.items()}
    found, covered, so_far = {}, list[Span](), 0.0
    for kind in ("select", "decode", "compute", "input"):
        covered = union([*covered, *inside[kind]])
        found[kind] = length(covered) - so_far
        so_far += found[kind]
    whole = step[1] - step[0]
    return found | {"exchange": length(inside["exchange"]), "wait": whole - so_far, "step": whole}


def within(step: Span, spans: Iterable[Span]) -> list[Span]:
    """Return the parts of spans that are in a step."""
    cut = ((max(start, step[0]), min(end, step[1])) for start, end in spans)
    return [(start, end) for start, end in cut if start < end]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the times that are in any of the spans, as spans that do not touch each other."""
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
