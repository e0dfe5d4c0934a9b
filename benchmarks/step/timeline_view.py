"""A recorded step as a Chrome trace and as a plot: one lane for each purpose of an op."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from benchmarks.step import anatomy
from benchmarks.step.trace_events import Event, rows_of, union

_VERBS = {"Gather": "all-gather", "Reduce": "all-reduce", "AllToAll": "all-to-all"}
_COLORS = {"forward": "C0", "backward": "C4", "selection": "C1", "decode": "C2", "update": "C5"}


@dataclasses.dataclass(frozen=True)
class Recording:
    """A worker's recording.

    Attributes:
        steps: The steps.
        ops: The ops of all of them.
        scope: Name of the optimizer.
        roles: See `anatomy.roles`.
        requests: The exchange's requests of a step, in their order: `type` and `tensors`.
        model: Name of the model.
    """

    steps: list[Event]
    ops: list[Event]
    scope: str
    roles: dict[str, str]
    requests: list[dict[str, Any]]
    model: str

    def lanes(self, step: Event) -> dict[str, list[Event]]:
        """Returns the ops of one step by their lanes."""
        ops = [op for op in self.ops if op.start >= step.start and op.end <= step.end]
        return anatomy.by_lane(ops, self.scope, self.roles)

    def typical(self) -> Event:
        """Returns the step of median duration."""
        return sorted(self.steps, key=lambda s: s.end - s.start)[(len(self.steps) - 1) // 2]

    def layer(self, op: Event) -> str:
        """Returns the layer of an op if its name contains it, or ""."""
        words = op.name.removeprefix("gradient_tape/").split("/")
        if len(words) < 3 or not re.fullmatch(rf"{self.model}(_\d+)?", words[0]):
            return ""
        # If a model is called twice, its scope and those of its layers are numbered.
        return words[1] if words[0] == self.model else re.sub(r"_\d+$", "", words[1])

    def collectives(self) -> dict[str, list[str]]:
        """Returns the collectives of steps with their bucket's tensors, in the order of requests.

        TensorFlow numbers ops of the same type in the order of creation: X, X_1, X_2. Other
        collectives, and those in branches, follow without tensors, by their starts.
        """
        sent = [op for step in self.steps for op in self.lanes(step)[anatomy.COLLECTIVE]]
        names = dict.fromkeys(op.name for op in sorted(sent, key=lambda op: op.start))
        found, counts = {}, collections.Counter()
        for request in self.requests:
            number = counts[request["type"]]
            counts[request["type"]] += 1
            suffix = f"_{number}" if number else ""
            name = f"{self.scope}/{request['type']}{suffix}"
            if name in names:
                found[name] = request["tensors"]
        return found | {name: [] for name in names if name not in found}


def label(name: str, tensors: list[str]) -> str:
    """Returns the label of a collective: the verb, and the layers whose gradients it carries."""
    found = re.search(r"Collective(\w+?)V\d", name)
    verb = _VERBS.get(found[1], found[1]) if found else name
    layers = list(dict.fromkeys(t.split("/")[-2] if "/" in t else t for t in tensors))
    if len(layers) > 3:
        layers = [*layers[:2], "...", layers[-1]]
    return f"{verb}: {', '.join(layers)}" if layers else f"{verb} ({name.split('/')[-1]})"


def chrome_trace(recording: Recording, title: str) -> dict[str, Any]:
    """Returns a trace for chrome://tracing or ui.perfetto.dev; every lane is a thread."""
    origin = recording.steps[0].start
    events: list[dict[str, Any]] = [_named("process_name", 0, title)]
    threads = 0

    def add(lane: str, ops: list[Event], more: dict[str, Any]) -> None:
        nonlocal threads
        for row in rows_of(ops):
            events.append(_named("thread_name", threads, lane))
            events.append(
                {**_named("thread_sort_index", threads, ""), "args": {"sort_index": threads}}
            )
            for op in row:
                span = {"ts": op.start - origin, "dur": op.end - op.start}
                arguments = {"op": op.type, "thread": op.thread, **more}
                head = {"name": op.name, "cat": lane, "ph": "X", "pid": 0, "tid": threads}
                events.append({**head, **span, "args": arguments})
            threads += 1

    add("step", recording.steps, {})
    lanes: dict[str, list[Event]] = collections.defaultdict(list)
    for step in recording.steps:
        for name, ops in recording.lanes(step).items():
            lanes[name] += ops
    for name in ("forward", "backward", "selection"):
        add(name, lanes[name], {})
    for name, tensors in recording.collectives().items():
        ops = [op for op in lanes[anatomy.COLLECTIVE] if op.name == name]
        add(label(name, tensors), ops, {"tensors": tensors})
    for name in ("decode", "update", "other"):
        add(name, lanes[name], {})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


def plot(recording: Recording, title: str, path: str) -> None:
    """Plots the median step; the exposed part of a collective is darker."""
    from matplotlib.figure import Figure

    step = recording.typical()
    lanes = recording.lanes(step)
    computing = union(
        (op.start, op.end) for name in lanes if name != anatomy.COLLECTIVE for op in lanes[name]
    )
    sent = lanes[anatomy.COLLECTIVE]
    rows: list[tuple[str, str, list[Event]]] = [
        (name, _COLORS[name], lanes[name]) for name in ("forward", "backward", "selection")
    ]
    for name, tensors in recording.collectives().items():
        rows.append((label(name, tensors), "C3", [op for op in sent if op.name == name]))
    rows += [(name, _COLORS[name], lanes[name]) for name in ("decode", "update")]
    wall = (step.end - step.start) / 1e3
    figure = Figure(figsize=(13, 1.3 + 0.42 * len(rows)))
    axes = figure.subplots()
    for y, (_, color, ops) in enumerate(rows):
        axes.axhline(y, color="0.9", linewidth=0.6, zorder=0)
        for op in ops:
            start, end = (op.start - step.start) / 1e3, (op.end - step.start) / 1e3
            light = color == "C3"
            axes.broken_barh(
                [(start, end - start)], (y - 0.38, 0.76), facecolor=color, edgecolor=color,
                linewidth=0.6, alpha=0.35 if light else 0.6,
            )  # fmt: skip
            for gap in _outside(op, computing) if light else ():
                span = ((gap[0] - step.start) / 1e3, (gap[1] - gap[0]) / 1e3)
                axes.broken_barh([span], (y - 0.38, 0.76), facecolor=color)
        for text, start, end in _layers(recording, ops):
            middle = ((start + end) / 2 - step.start) / 1e3
            if (end - start) / 1e3 > 0.0065 * len(text) * wall:
                axes.text(middle, y, text, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=9)
    axes.set(xlim=(0, wall), ylim=(len(rows) - 0.4, -0.6), xlabel="ms since the step began")
    axes.set_title(f"{title}: one step of worker 0, {wall:.0f} ms", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _outside(op: Event, spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the parts of an op outside of all spans."""
    gaps, at = [], op.start
    for start, end in spans:
        if start >= op.end:
            break
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    return [*gaps, (at, op.end)] if at < op.end else gaps


def _layers(recording: Recording, ops: list[Event]) -> list[tuple[str, float, float]]:
    """Returns (layer, start, end) for every uninterrupted run of ops of the same layer."""
    runs: list[tuple[str, float, float]] = []
    for op in sorted(ops, key=lambda op: op.start):
        layer, pause = recording.layer(op), 1e3
        if runs and runs[-1][0] == layer and op.start - runs[-1][2] < pause:
            runs[-1] = (layer, runs[-1][1], max(runs[-1][2], op.end))
        elif layer:
            runs.append((layer, op.start, op.end))
    return runs
