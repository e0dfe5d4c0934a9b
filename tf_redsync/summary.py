"""The table of `optimizer.summary()`, in the format of Keras's `model.summary()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tf_redsync.exchange.layout import Bucket
from tf_redsync.explanation import dense_bytes
from tf_redsync.tables import aligned

HEAD = ("variable", "shape", "method", "density", "bytes a step", "ratio", "selection", "state")
_RIGHT = (3, 4, 5, 7)


def lines(
    buckets: Sequence[Bucket],
    states: Sequence[Any],
    workers: int,
    sent: Callable[[Bucket], float],
) -> tuple[list[tuple[str, ...]], int]:
    """Return the rows of the table, in the model's order, and the bytes of all state.

    Args:
        buckets: All buckets.
        states: The `StateVariables` of each bucket.
        workers: Number of workers.
        sent: Returns the bytes per worker and step of a bucket.
    """
    rows: dict[int, tuple[str, ...]] = {}  # by position of the variable
    state_bytes = 0
    for bucket, state in zip(buckets, states, strict=True):
        specs = bucket.layout.specs
        variable_bytes = [0] * len(specs)
        for group in state.variables_by_name.values():
            sizes = [v.shape.num_elements() * v.dtype.size for v in group]
            state_bytes += sum(sizes)
            if len(group) == len(specs):  # one for each variable
                variable_bytes = [a + b for a, b in zip(variable_bytes, sizes, strict=True)]
        shares = _shares(bucket, sent)
        for spec, share, size in zip(specs, shares, variable_bytes, strict=True):
            dense = dense_bytes([spec], workers)
            rows[spec.position] = (
                spec.name,
                str(spec.shape),
                type(bucket.method).__name__,
                f"{density_of(bucket.method, spec):.4g}",
                f"{share:,.0f}",
                _ratio(dense, share),
                bucket.method.describe(spec),
                format_bytes(size),
            )
    return [rows[position] for position in sorted(rows)], state_bytes


def density_of(method: Any, spec: Any) -> float:
    """Return the fraction of a tensor's elements that a method sends in a step."""
    count = getattr(method, "k", None)  # of methods that select
    if callable(count):
        return float(count(spec)) / max(1, spec.size)
    return 1.0 / float(method.traits.waiting_steps)


def _shares(bucket: Bucket, sent: Callable[[Bucket], float]) -> list[float]:
    """Return the bytes of each tensor of a bucket, in proportion to the bytes it needs alone."""
    layout, specs, total = bucket.layout, bucket.layout.specs, sent(bucket)
    if len(specs) == 1 or not total:
        return [total / len(specs)] * len(specs)
    layouts = [dataclasses.replace(layout, specs=(s,)) for s in specs]
    alone = [sent(dataclasses.replace(bucket, layout=one)) for one in layouts]
    whole = sum(alone)
    return [total * a / whole for a in alone] if whole else [total / len(specs)] * len(specs)


def _ratio(dense: float, sent: float) -> str:
    if not dense:
        return "-"
    return f"{dense / sent:,.1f}" if sent else "inf"


def format_bytes(count: float) -> str:
    """Return a number of bytes in the format of Keras's `model.summary()`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            break
        count /= 1024
    return f"{count:.2f} {unit}"


def write(exchange: Any, name: str, print_fn: Callable[[str], Any] | None) -> None:
    """Print the table; see `Wrapper.summary`.

    Args:
        exchange: A `GradientExchange`, or the `ExchangeBuilder` before it is built.
        name: Name of the optimizer.
        print_fn: Called with each line; `None`: `print`.
    """
    if print_fn is not None and not callable(print_fn):
        raise ValueError(
            "`print_fn` must be a function of one line of text, or None. Received: "
            f"print_fn={print_fn!r}"
        )
    for line in of_exchange(exchange, name):
        (print_fn or print)(line)


def of_exchange(exchange: Any, name: str) -> list[str]:
    """Return the lines of the table of a built exchange."""
    schedule, workers = exchange.schedule, exchange.workers
    rows, state_bytes = lines(
        schedule.buckets,
        exchange.states,
        workers,
        lambda bucket: schedule.bytes_in_use(bucket, workers),
    )
    head, *body = aligned([HEAD, *rows], _RIGHT)
    rule = max(map(len, (head, *body)))
    table = [f'Optimizer: "{name}"', "=" * rule, head, "-" * rule, *body, "=" * rule]
    footer = exchange.explain().footer
    return [*table, *footer, f"state of the exchange on a worker: {format_bytes(state_bytes)}"]
