"""An exchange's state as totals over the workers, for comparison in tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_redsync.state import restore as restore_module


def total(exchange: Any) -> dict[str, Any]:
    """Return the state by name, as sums or means over the workers; a collective call."""
    with exchange.agreed("save the exchange's state"):
        return {n: _total(exchange, v, kind).numpy() for n, v, kind in _named_variables(exchange)}


def _total(exchange: Any, variable: tf.Variable, kind: str) -> Any:
    if kind == "shared":
        return variable
    (total,) = exchange.network.all_reduce([variable.read_value()])
    return total if kind == "sum" else total / exchange.workers


def restore(exchange: Any, arrays: dict[str, Any]) -> None:
    """Assign the result of `total`; each worker gets an equal share of a sum.

    If `Auto` has chosen other methods than in the saved run, the saved residuals are dropped with a
    warning. Any other difference is an error.
    """
    with exchange.agreed("restore the exchange's state"):
        _restore(exchange, arrays)
    restore_module.mark_restored(exchange)


def _restore(exchange: Any, arrays: dict[str, Any]) -> None:
    variables = {n: (v, kind) for n, v, kind in _named_variables(exchange)}
    shapes = {n: tuple(v.shape) for n, (v, _) in variables.items()}
    found = {n: tuple(a.shape) for n, a in arrays.items()}
    if shapes != found:
        if exchange.resolved is exchange.policy:
            raise ValueError(
                "the saved exchange state belongs to another model or method. Expected "
                f"{shapes}. Received: {found}. Load with compile=False and compile again."
            )
        warnings.warn(
            f"{type(exchange.policy).__name__} has chosen other methods than in the run that was "
            "saved, so the saved residuals are dropped.",
            stacklevel=5,
        )
        variables = {name: variables[name] for name in ("step", "skipped")}
    for name, (variable, kind) in variables.items():
        variable.assign(arrays[name] / exchange.workers if kind == "sum" else arrays[name])


def _named_variables(exchange: Any) -> Iterator[tuple[str, tf.Variable, str]]:
    """Yield names, variables and kinds; `"shared"` also if TensorFlow sums the variable."""
    yield "step", exchange.step, "shared"
    yield "skipped", exchange.skipped, "shared"
    if exchange.consensus is not None:
        yield "consensus/steps", exchange.consensus.steps, "shared"
        yield "consensus/rounds", exchange.consensus.rounds, "shared"
        for i, variable in enumerate(exchange.consensus.agreed):
            yield f"consensus/{i}", variable, "shared"
    for bucket, variables in enumerate(exchange.states):
        for name, group in variables.variables_by_name.items():
            kind = variables.kinds[name] if exchange.worker.replicas > 1 else "shared"
            for i, variable in enumerate(group):
                yield f"bucket_{bucket}/{name}/{i}", variable, kind
