"""Parser of method expressions: `RedSync(density=0.01, momentum=0.9), warm_up=DenseWarmUp(100)`.

An expression has the arguments of `DistributedOptimizer` after the inner optimizer: a method, a
policy or `Auto`, and optional keyword arguments. It may call registered classes (methods, warm-ups,
codings, policies), with numbers, strings, tuples or such calls. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any

Known = Mapping[str, type]
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Expression:
    """The value of an expression.

    Attributes:
        method: A method, a policy or `Auto`.
        options: The keyword arguments.
    """

    method: Any
    options: dict[str, Any]


def evaluate(text: str, others: Known = _NOTHING, more: Mapping[str, Any] = _NOTHING) -> Expression:
    """Return the value of an expression.

    Args:
        text: The expression in Python, with or without the prefix `rs.` or `tf_redsync.`.
        others: Additional classes by name.
        more: Arguments of the method besides those in `text`.

    Raises:
        ValueError: the expression is invalid; the message says where.
    """
    from tf_redsync.config import registered

    try:
        return _evaluated(text, {**others, **registered()}, more)
    except (MemoryError, RecursionError) as error:
        raise ValueError(f"the expression has too many nested parts. Received: {text!r}") from error


def _evaluated(text: str, known: Known, more: Mapping[str, Any]) -> Expression:
    from tf_redsync.auto import Auto
    from tf_redsync.exchange.method import Method
    from tf_redsync.policy import Policy

    try:
        call = ast.parse(f"f({text.strip()})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            "a method must be a Python expression, such as RedSync(density=0.01): "
            f"{error.msg}. Received: {text!r}"
        ) from error
    # Text such as "TopK())(RedSync()" closes the parenthesis, so that `func` is not the name f.
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and len(call.args) == 1):
        raise ValueError(f"exactly one method is needed, such as TopK(). Received: {text!r}")
    first = call.args[0]
    if isinstance(first, ast.Call):
        method = _called(first, text, known, more)
    else:
        method = _value(first, text, known)
    if isinstance(method, type) and issubclass(method, Method):
        raise ValueError(f"a method must be called: {method.__name__}(). Received: {text!r}")
    if not isinstance(method, (Method, Policy, Auto)):
        raise ValueError(f"the value must be a method or a policy. Received: {text!r}")
    return Expression(method, _named(call, text, known))


def called(text: str) -> str:
    """Return an expression; a call without arguments if it is only a name.

    Example:
        >>> called("RedSync"), called("RedSync(density=0.01)")
        ('RedSync()', 'RedSync(density=0.01)')
    """
    return f"{text}()" if text.strip().isidentifier() else text


def _value(node: ast.expr, text: str, known: Known) -> Any:
    if isinstance(node, ast.Call):
        return _called(node, text, known)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _class(node, text, known)
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(item, text, known) for item in node.elts)
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):  # TypeError: a dict with a list as a key
        raise ValueError(
            "arguments must be numbers, strings, booleans, None, tuples of them, or calls of "
            f"registered classes. Received: {ast.unparse(node)} in {text!r}"
        ) from None


def _called(node: ast.Call, text: str, known: Known, more: Mapping[str, Any] = _NOTHING) -> Any:
    positional = [_value(argument, text, known) for argument in node.args]
    named = _named(node, text, known)
    function = node.func
    made: Any
    if isinstance(function, ast.Attribute) and function.attr == "preset":
        cls = _class(function.value, text, known)
        made = getattr(cls, function.attr, None)
        if made is None:
            raise ValueError(f"{cls.__name__} has no presets. Received: {text!r}")
    else:
        made = _class(function, text, known)
    try:
        return made(*positional, **named, **more)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} Received: {text!r}") from error


def _named(node: ast.Call, text: str, known: Known) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"`**` is not supported in arguments. Received: {text!r}")
        if keyword.arg in named:
            raise ValueError(f"`{keyword.arg}` is given twice. Received: {text!r}")
        named[keyword.arg] = _value(keyword.value, text, known)
    return named


def _class(node: ast.expr, text: str, known: Known) -> type:
    """Return the class of a name."""
    from tf_redsync.exchange.method import Method

    parts = ast.unparse(node).split(".")
    for folders in (("rs", "tf_redsync"), ("contrib",), ("codings", "methods", "outer")):
        if parts[0] in folders:
            parts = parts[1:] or parts
    name = ".".join(parts)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        methods = [n for n, cls in known.items() if issubclass(cls, Method)]
        raise ValueError(
            f"{name!r} is not a registered class. {hint}Methods: {', '.join(sorted(methods))}. "
            f"Received: {text!r}"
        )
    return known[name]
