"""Operations on events that `tf_redsync/metrics/trace_events.py` reads."""

from __future__ import annotations

from collections.abc import Iterable

from tf_redsync.metrics.trace_events import Event, Span, host_events, length, read, union

__all__ = ["Event", "host_events", "length", "overlap", "read", "rows_of", "union"]


def rows_of(events: Iterable[Event]) -> list[list[Event]]:
    """Returns the events in as few rows as possible without overlaps, ordered by start."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        free = next((row for row in rows if row[-1].end <= event.start), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def overlap(a: list[Span], b: list[Span]) -> float:
    """Returns the time in which two lists of spans, each without overlaps, overlap."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in a
        for other_start, other_end in b
    )
