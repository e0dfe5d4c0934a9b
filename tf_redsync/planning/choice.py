"""What to plan: a method, a policy or `Auto`, from the command line."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from tf_redsync.auto import Auto
from tf_redsync.keras import accuracy, conflicts
from tf_redsync.keras.adapter import as_policy
from tf_redsync.methods.base import Method, registered
from tf_redsync.planning import PlanError, prediction
from tf_redsync.policy import Policy


def parse(text: str, density: float | None = None) -> Method | Policy | Auto:
    """Return what an expression such as `RedSync` or `RedSync(density=0.01)` stands for.

    Names are those of methods, policies and schedules; arguments are keywords with constants or
    further such names. Nothing else is evaluated.

    Args:
        text: The expression.
        density: For what has a density and is given without one.

    Raises:
        PlanError: for anything else, and for hyper-parameters out of their range.

    Example:
        >>> parse("TopK", 0.01).density
        0.01
    """
    known = registered()

    def build(node: ast.AST, **more: Any) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(build(element) for element in node.elts)
        name, keywords = node, []
        if isinstance(node, ast.Call) and not node.args:
            name, keywords = node.func, node.keywords
        if isinstance(name, ast.Name) and name.id in known:
            return known[name.id](**{str(k.arg): build(k.value) for k in keywords}, **more)
        return ast.literal_eval(node)

    try:
        body = ast.parse(text.strip(), mode="eval").body
        made = build(body, **({} if density is None else {"density": density}))
        if isinstance(made, (Method, Policy, Auto)):
            return made
        reason = f"{text} is none of them"
    except (SyntaxError, TypeError, ValueError) as error:
        reason = str(error)
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
