"""An exchange's state as sums over the workers: for tests that compare it.

It goes through the variables' own `total` and `restore_total`, as TensorFlow's checkpoints do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_redsync.state import restore as restore_module
from tf_redsync.step.state_variables import HostVariable


def total(exchange: Any) -> dict[str, Any]:
    """Return the state by name, as sums or means over the workers. All of them must call it."""
    with exchange.agreed("save the exchange's state"):
        return {
            name: (v.total() if isinstance(v, HostVariable) else v).numpy()
            for name, v in _named_variables(exchange)
        }


def restore(exchange: Any, arrays: dict[str, Any]) -> None:
    """Assign what `total` returned; sums are given to the workers in equal shares.

    Where `Auto` has chosen other methods than in the run that saved, the saved residuals have no
    place, which is a warning; any other difference is an error.
    """
    with exchange.agreed("restore the exchange's state"):
        _restore(exchange, arrays)
    restore_module.mark_restored(exchange)


def _restore(exchange: Any, arrays: dict[str, Any]) -> None:
    variables = dict(_named_variables(exchange))
    shapes = {n: tuple(v.shape) for n, v in variables.items()}
    found = {n: tuple(a.shape) for n, a in arrays.items()}
    if shapes != found:
        if exchange.resolved is exchange.policy:
            raise ValueError(
                "the saved state of the exchange is that of another model or method. Expected "
                f"{shapes}. Received: {found}. Load with compile=False and compile anew."
            )
        warnings.warn(
            f"{type(exchange.policy).__name__} has chosen other methods than in the run that was "
            "saved, so the saved residuals (what was not delivered yet) are dropped.",
            stacklevel=5,
        )
        variables = {name: variables[name] for name in ("step", "skipped")}
    for name, variable in variables.items():
        if isinstance(variable, HostVariable):
            variable.restore_total(tf.convert_to_tensor(arrays[name]))
        else:
            variable.assign(arrays[name])


def _named_variables(exchange: Any) -> Iterator[tuple[str, tf.Variable]]:
    yield "step", exchange.step
    yield "skipped", exchange.skipped
    if exchange.consensus is not None:
        yield "consensus/steps", exchange.consensus.steps
        yield "consensus/rounds", exchange.consensus.rounds
        for i, variable in enumerate(exchange.consensus.agreed):
            yield f"consensus/{i}", variable
    for bucket, variables in enumerate(exchange.states):
        for name, group in variables.variables_by_name.items():
            for i, variable in enumerate(group):
                yield f"bucket_{bucket}/{name}/{i}", variable
