"""The purpose of each op of a training step: forward, backward, selection and so on.

The lane of an op follows from its type and its name. For the optimizer's small ops it follows from
the graph: inputs of a collective are selection, and consumers of its result are decoding.
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
        For names of ops, "selection" if a collective needs the op, or "decode" if the op needs a
        collective. Ops in branches are omitted.
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
    """Returns the purpose of an op: one of `COMPUTE`, `COLLECTIVE`, or "other".

    Args:
        op: Op of a profile.
        scope: Name of the optimizer.
        role: From `roles`; empty for an optimizer without an exchange, whose ops are updates.
    """
    if op.type.startswith("Collective"):
        return COLLECTIVE
    for name, pattern in (("selection", _SELECT), ("decode", _DECODE), ("update", _UPDATE)):
        if pattern.fullmatch(op.type):
            return name
    for name in ("selection", "decode"):  # in the driver's scopes, also inside branches
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
    """Extends an all-to-all until its result is opened: in a profile it ends after sending."""
    if op.type != "CollectiveAllToAllV2":
        return op
    scope = op.name.rpartition("/")[0]
    ends = [o.start for o in opened if o.start >= op.end and o.name.startswith(scope)]
    return dataclasses.replace(op, end=min(ends)) if ends else op


def parts(step: Event, lanes: dict[str, list[Event]]) -> dict[str, float]:
    """Returns the parts of a step's time, in ms.

    Returns:
        `wall`; for every lane that computes, and `other`, the time in which at least one of its ops
        ran; `computing`, the time in which any of them did; `collectives`, the time in which at
        least one was in flight; `hidden`, its part that overlapped with computing, and `exposed`,
        the rest of it; `idle`, the rest. `computing`, `exposed` and `idle` add up to `wall`.
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
