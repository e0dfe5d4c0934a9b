"""Where the time of a step goes, from a short profile of a few steps.

TensorFlow's profiler records the ops of this process on the CPU; their types and names tell what
they are for (`driver.SELECTING`, `DECODING`). `profiler.py` makes the profile.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from tf_redsync.exchange.driver import DECODING, SELECTING
from tf_redsync.metrics.trace_events import Span, host_events, length, union

STEP = "tf_redsync_step"
_INPUT = re.compile(r"IteratorGetNext(AsOptional|Sync)?|OptionalGetValue")
_SELECT = re.compile(r"Redsync(AccumulateAndSelect|Quantize|GolombEncode|BloomBuild)")
_DECODE = re.compile(r"Redsync(Decode|DequantizeSum|GolombDecode|BloomQuery|SparseMerge)")


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


def split_of(space: Any, steps: int) -> Split:
    """Return what the time of the recorded steps went into: the mean of them.

    Args:
        space: From `trace_events.read`.
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
    steps, ops = host_events(space, STEP)
    lanes: dict[str, list[Span]] = {f.name: [] for f in dataclasses.fields(Split)}
    for op in ops:
        lanes[lane(op.name, op.type)].append((op.start, op.end))
    recorded = [(step.start, step.end) for step in steps]
    return recorded, {kind: union(spans) for kind, spans in lanes.items()}


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
