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
    """Return the numbers of workers to try: fewer for the further variants of a method."""
    full = DEEP or _FIRST[type(TABLE[name].method)] == name
    return WORKERS if full else (1, 3, 8)


def cases(names=TABLE, counts=WORKERS) -> list[tuple[str, int]]:
    """Return names with those of `counts` that are to be tried, or else with 3 workers."""
    return [
        (name, workers)
        for name in names
        for workers in [w for w in worker_counts(name) if w in counts] or [3]
    ]
