"""What the ops of a training step are there for: forward, backward, selection and so on.

The lane of an op follows from its type and its name, and for the optimizer's own small ops from the
graph: what a collective needs is selection, what needs a collective's answer is decoding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from benchmarks.step.trace_events import Event, length, overlap, union

COMPUTE = ("forward", "backward", "selection", "decode", "update")
COLLECTIVE = "collective"
_SELECT = re.compile(r"Redsync(AccumulateAndSelect|Quantize|GolombEncode|BloomBuild)")
_DECODE = re.compile(r"Redsync(Decode|DequantizeSum|GolombDecode|BloomQuery|SparseMerge)")
_UPDATE = re.compile(r"Assign\w*VariableOp|ResourceApply\w+|ResourceScatter\w+|RedsyncDescend")


def roles(graph: Any, scope: str) -> dict[str, str]:
    """Returns the lanes of the optimizer's ops around the collectives of a graph.

    Args:
        graph: A traced step's graph.
        scope: Name of the optimizer; its ops' names begin with it.

    Returns:
        For names of ops, "selection" where a collective needs the op, else "decode" where the op
        needs a collective. What stands in branches is not among them.
    """
    own = [op for op in graph.get_operations() if op.name.startswith(f"{scope}/")]
    names = {op.name for op in own}
    sends = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    before = lambda op: [x.op for x in op.inputs if x.op.name in names]  # noqa: E731
    after = lambda op: [  # noqa: E731
        user for x in op.outputs for user in x.consumers() if user.name in names
    ]
    decodes = dict.fromkeys(_reached(sends, after), "decode")
    return decodes | dict.fromkeys(_reached(sends, before), "selection")


def _reached(start: list[Any], neighbours: Any) -> list[str]:
    found: dict[str, Any] = {}
    waiting = list(start)
    while waiting:
        for op in neighbours(waiting.pop()):
            if op.name not in found and not op.type.startswith("Collective"):
                found[op.name] = op
                waiting.append(op)
    return list(found)


def lane(op: Event, scope: str, role: dict[str, str]) -> str:
    """Returns what an op is for: of `COMPUTE`, `COLLECTIVE`, or "other".

    Args:
        op: From a profile.
        scope: Name of the optimizer.
        role: From `roles`; empty for an optimizer without an exchange, whose ops are updates.
    """
    if op.type.startswith("Collective"):
        return COLLECTIVE
    for name, pattern in (("selection", _SELECT), ("decode", _DECODE), ("update", _UPDATE)):
        if pattern.fullmatch(op.type):
            return name
    for name in ("selection", "decode"):  # in the driver's scopes, also where they are in branches
        if f"/redsync_{name.removesuffix('ion')}" in op.name:
            return name
    if op.name.startswith("gradient_tape/"):
        return "backward"
    if op.name.startswith(f"{scope}/"):
        plain = not role or op.name.startswith(f"{scope}/cond")
        return "update" if plain else role.get(op.name, "other")
    return "forward" if "/" in op.name else "other"


def by_lane(ops: Iterable[Event], scope: str, role: dict[str, str]) -> dict[str, list[Event]]:
    """Returns the ops of each lane."""
    lanes: dict[str, list[Event]] = {name: [] for name in (*COMPUTE, COLLECTIVE, "other")}
    ops = list(ops)
    opened = [op for op in ops if op.type == "RedsyncOpen"]
    for op in ops:
        lanes[lane(op, scope, role)].append(_answered(op, opened))
    return lanes


def _answered(op: Event, opened: list[Event]) -> Event:
    """An all-to-all until its answer is opened: in a profile it ends when all has been sent."""
    if op.type != "CollectiveAllToAllV2":
        return op
    scope = op.name.rpartition("/")[0]
    ends = [o.start for o in opened if o.start >= op.end and o.name.startswith(scope)]
    return dataclasses.replace(op, end=min(ends)) if ends else op


def parts(step: Event, lanes: dict[str, list[Event]]) -> dict[str, float]:
    """Returns what a step's time went into, in ms.

    Returns:
        `wall`; for every lane that computes, and `other`, how long at least one of its ops ran;
        `computing`, how long any of them did; `collectives`, how long at least one was under way;
        `hidden`, how much of that ran beside computing, `exposed`, how much did not; `idle`, the
        rest. `computing`, `exposed` and `idle` add up to `wall`.
    """
    spans = {
        name: union((max(e.start, step.start), min(e.end, step.end)) for e in events)
        for name, events in lanes.items()
    }
    collectives = spans.pop(COLLECTIVE)
    computing = union(span for each in spans.values() for span in each)
    wall, busy, sent = step.end - step.start, length(computing), length(collectives)
    hidden = overlap(collectives, computing)
    micro = {name: length(each) for name, each in spans.items()} | {
        "wall": wall,
        "computing": busy,
        "collectives": sent,
        "hidden": hidden,
        "exposed": sent - hidden,
        "idle": wall - busy - (sent - hidden),
    }
    return {name: value / 1e3 for name, value in micro.items()}
