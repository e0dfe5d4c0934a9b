"""What to plan: a method, a policy or `Auto`, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_redsync import expressions
from tf_redsync.auto import Auto
from tf_redsync.config import registered
from tf_redsync.exchange.method import Method
from tf_redsync.keras import accuracy, conflicts
from tf_redsync.keras.adapter import as_policy
from tf_redsync.planning import PlanError, prediction
from tf_redsync.policy import Policy


def parse(text: str, density: float | None = None) -> Method | Policy | Auto:
    """Return what an expression such as `RedSync` or `RedSync(density=0.01)` stands for.

    See `tf_redsync/expressions.py`; a name alone is called.

    Args:
        text: The expression.
        density: For what has a density and is given without one.

    Raises:
        PlanError: for anything else, and for hyper-parameters out of their range.

    Example:
        >>> parse("TopK", 0.01).density
        0.01
    """
    more = {} if density is None else {"density": density}
    try:
        found = expressions.evaluate(expressions.called(text), more=more)
        if not found.options:
            return found.method
        reason = f"{', '.join(found.options)} is for DistributedOptimizer"
    except ValueError as error:
        reason = str(error)
    known = registered()
    names = ", ".join(sorted(n for n, c in known.items() if issubclass(c, Method)))
    given = "" if density is None else f", --density={density}"
    raise PlanError(
        f"`--method` must be Auto or one of {names}, alone or with keywords as in "
        f"'RedSync(density=0.01)'. Received: --method={text}{given} ({reason})"
    )


def suited(
    method: Method | Policy | Auto, optimizer: Any, warn: Callable[[str], None]
) -> Policy | Auto:
    """Return what to plan for a model that is compiled with `optimizer`, or with none.

    Args:
        method: What was asked for.
        optimizer: `None` for a model that is not compiled.
        warn: Called with what `DistributedOptimizer` would warn of.

    Raises:
        PlanError: for what cannot be planned, or does not go with the optimizer.
    """
    policy = as_policy(method)
    prediction.check(policy.methods)
    inner = conflicts.innermost(optimizer)
    if inner is None:
        return policy
    try:
        return accuracy.suited(inner, policy, warn)
    except ValueError as error:
        raise PlanError(str(error)) from error
