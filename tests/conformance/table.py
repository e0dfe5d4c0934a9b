"""The table: every public method, in its variants; the entries are in `families/`, one file each.

A new method needs one entry; `test_laws.test_table_covers_every_public_method` says so.
"""

import importlib
import pkgutil

from tests.conformance import families
from tests.conformance.descriptor import WORKERS
from tests.deep import DEEP

TABLE = {}
for module in pkgutil.iter_modules(families.__path__, families.__name__ + "."):
    entries = importlib.import_module(module.name).TABLE
    assert not set(entries) & set(TABLE), f"{module.name} repeats a name"
    TABLE.update(entries)

_FIRST = {type(d.method): name for name, d in reversed(TABLE.items())}


def worker_counts(name: str) -> tuple[int, ...]:
    """Return the numbers of workers to try: fewer for the further variants of a method.

    Pairs and blocks need a number that is no power of two, and two rounds or more: 7 and 3 do.
    """
    first = _FIRST[type(TABLE[name].method)] == name
    if DEEP:
        return WORKERS
    return (1, 2, 3, 7) if first else (3,)


def cases(names=TABLE, counts=WORKERS) -> list[tuple[str, int]]:
    """Return names with those of `counts` that are to be tried, or else with 3 workers."""
    return [(name, workers) for name in names for workers in counts_of(name, counts)]


def counts_of(name: str, counts=WORKERS) -> list[int]:
    """Return those of `counts` that are to be tried with a method, or else 3."""
    return [w for w in worker_counts(name) if w in counts] or [3]
