"""What is exchanged, on a command line: `RedSync(momentum=0.9), warm_up=DenseWarmUp(steps=100)`.

It is what stands behind the inner optimizer in `DistributedOptimizer(optimizer, ...)`: a method or
a policy, and perhaps named arguments. All of it is made of tf_redsync's methods, warm-ups, codings
and policies, and of `benchmarks/accuracy/variants.py`, called with numbers, strings, tuples or such
calls. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What is exchanged.

    Attributes:
        method: A method or a policy.
        options: The named arguments; `flush`, for `callbacks.Flush` in `fit`; and, for workers in
            one process, `rate_first`: gradients are multiplied by the learning rate before the
            exchange, which so holds updates, and `last_statistics`: those of BatchNormalization are
            gathered once more at the end, with the last weights.
    """

    method: Any
    options: dict[str, Any]


def exchanged(text: str) -> Exchanged:
    """Returns what an expression describes.

    Args:
        text: As a program would write it, with or without `rs.` or `tf_redsync.` in front.

    Raises:
        ValueError: says what is wrong with it.
    """
    import tf_redsync as rs

    try:
        call = ast.parse(f"f({text.strip()})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            "a method must be written as in a program, such as RedSync(density=0.01): "
            f"{error.msg}. Received: {text!r}"
        ) from error
    if not isinstance(call, ast.Call) or len(call.args) != 1:
        raise ValueError(f"there must be one method, such as TopK(). Received: {text!r}")
    method = _value(call.args[0], text)
    if isinstance(method, type) and issubclass(method, rs.Method):
        raise ValueError(f"a method is called, as in {method.__name__}(). Received: {text!r}")
    if not isinstance(method, (rs.Method, rs.Policy)):
        raise ValueError(f"this is not a method, nor a policy of methods. Received: {text!r}")
    return Exchanged(method, _named(call, text))


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _called(node, text)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _class(node, text)
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(item, text) for item in node.elts)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            "arguments must be numbers, strings, booleans, None, tuples of them, or calls of "
            f"tf_redsync's classes. Received: {ast.unparse(node)} in {text!r}"
        ) from None


def _called(node: ast.Call, text: str) -> Any:
    positional = [_value(argument, text) for argument in node.args]
    named = _named(node, text)
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "preset":
        made = _class(function.value, text).preset
    else:
        made = _class(function, text)
    try:
        return made(*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} Received: {text!r}") from error


def _named(node: ast.Call, text: str) -> dict[str, Any]:
    named = {k.arg: _value(k.value, text) for k in node.keywords if k.arg is not None}
    if len(named) < len(node.keywords):
        raise ValueError(f"arguments are written out, without **. Received: {text!r}")
    return named


def _class(node: ast.expr, text: str) -> type:
    """The registered class that a name stands for."""
    import tf_redsync as rs
    from benchmarks.accuracy.variants import SelectionVariant
    from tf_redsync.config import registered

    known: dict[str, type] = {"SelectionVariant": SelectionVariant}
    known |= {name: cls for name, cls in registered().items() if hasattr(rs, name)}
    known |= {name: cls for name, cls in registered().items() if hasattr(rs.codings, name)}
    parts = ast.unparse(node).split(".")
    if parts[0] in ("rs", "tf_redsync"):
        parts = parts[1:]
    if parts[:1] in (["codings"], ["methods"]):
        parts = parts[1:]
    name = ".".join(parts)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        methods = [n for n, cls in known.items() if issubclass(cls, rs.Method)]
        raise ValueError(
            f"{name!r} is no class of tf_redsync. {hint}Methods: {', '.join(sorted(methods))}. "
            f"Received: {text!r}"
        )
    return known[name]
