"""The differences between the workers' reports in JSON, without what they have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

_MOST = 10


def differences(texts: Sequence[str]) -> list[str]:
    """Return texts, without what is equal in all of them if they are JSON objects."""
    try:
        values = [json.loads(text) for text in texts]
    except ValueError:
        return list(texts)
    if not all(isinstance(value, dict) for value in values):
        return list(texts)
    flat = [dict(_leaves(value)) for value in values]
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    different = [
        k for k in keys if any(f.get(k, _MISSING) != flat[0].get(k, _MISSING) for f in flat)
    ]
    more = f", and {len(different) - _MOST} more" if len(different) > _MOST else ""
    return [", ".join(f"{k}={f.get(k, _MISSING)}" for k in different[:_MOST]) + more for f in flat]


_MISSING = "(none)"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The values in a structure, with the ways to them."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        for i, one in enumerate(value):
            yield from _leaves(one, f"{path}[{i}]")
    else:
        yield path, json.dumps(value)
