"""The table of every public method and its variants; `families/` has one file per family.

A new method needs one entry, see `test_laws.test_table_covers_every_public_method`. A family whose
`Traits.bits` is unique adds that formula to `CLAIMS`; see `test_claims.py`.
"""

import importlib
import pkgutil

from tests.conformance import families
from tests.conformance.descriptor import WORKERS
from tests.deep import DEEP
from tf_redsync.exchange.requests import PairGather

TABLE, CLAIMS = {}, {}
for found in pkgutil.iter_modules(families.__path__, families.__name__ + "."):
    module = importlib.import_module(found.name)
    assert not set(module.TABLE) & set(TABLE), f"{found.name} repeats a name"
    TABLE.update(module.TABLE)
    CLAIMS.update(getattr(module, "CLAIMS", {}))

_FIRST = {type(d.method): name for name, d in reversed(TABLE.items())}


def worker_counts(name: str) -> tuple[int, ...]:
    """Return the numbers of workers to test: fewer for variants and for methods of `contrib`.

    Blocks need a number that is no power of two; pairs need one that leaves several workers without
    a partner.
    """
    if DEEP:
        return WORKERS
    if not is_first(name) or (in_contrib(name) and not in_pairs(name)):
        return (3,)
    return (1, 2, 3, 5) if in_pairs(name) else (1, 2, 3)


def is_first(name: str) -> bool:
    """Return whether an entry is the first of its method."""
    return _FIRST[type(TABLE[name].method)] == name


def in_contrib(name: str) -> bool:
    """Return whether an entry's method is in `contrib`."""
    return type(TABLE[name].method).__module__.startswith("tf_redsync.contrib")


def in_pairs(name: str) -> bool:
    """Return whether a method exchanges with one partner after another."""
    return PairGather in TABLE[name].kinds(5)


def cases(names=TABLE, counts=WORKERS) -> list[tuple[str, int]]:
    """Return pairs of names and those of `counts` to test, or 3 workers if none."""
    return [(name, workers) for name in names for workers in counts_of(name, counts)]


def counts_of(name: str, counts=WORKERS) -> list[int]:
    """Return those of `counts` to test with a method, or 3 if none."""
    return [w for w in worker_counts(name) if w in counts] or [3]
