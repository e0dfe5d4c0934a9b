"""A printable table of all methods."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync.config import registered, registered_in, required
from tf_redsync.exchange.method import Method
from tf_redsync.tables import aligned

_YES_NO = {True: "yes", False: "no", None: "-"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """The traits of one method with default hyper-parameters."""

    name: str
    paper: str
    requests: str
    bits: str
    conserves: bool | None  # `None`, and "-" in other columns, if a hyper-parameter has no default
    contrib: bool = False

    @property
    def called(self) -> str:
        """Name of the method in `tf_redsync`."""
        return f"contrib.{self.name}" if self.contrib else self.name


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """All methods; `str` returns a table."""

    entries: tuple[Entry, ...]

    @override
    def __str__(self) -> str:
        head = ("method", "paper", "requests", "bits per element", "conserves")
        lines = [head] + [
            (e.called, e.paper, e.requests, e.bits, _YES_NO[e.conserves]) for e in self.entries
        ]
        return "\n".join(aligned(lines))


def methods_in(package: str) -> dict[str, type[Method]]:
    """Import all modules of a package; return the methods that they register, by name."""
    return {n: c for n, c in registered_in(package).items() if issubclass(c, Method)}


def table() -> Catalogue:
    """Return all methods with paper, requests, bits per element, and conservation.

    The bits are those that a worker passes to the collectives in a step.

    A method conserves gradients if it sends all of them sooner or later: the sum over workers of
    gradient and old residual equals the total plus the sum over workers of the new residual.

    Example:
        >>> next(e.paper for e in table().entries if e.name == "PowerSGD")
        'Vogels, Karimireddy, Jaggi 2019'
    """
    entries = []
    for name, cls in sorted(registered().items()):
        if issubclass(cls, Method):
            contrib = cls.__module__.startswith("tf_redsync.contrib.")
            if required(cls):
                entries.append(Entry(name, "-", "-", "-", None, contrib))
                continue
            t = cls().traits
            entries.append(Entry(name, t.paper, t.requests, t.bits, t.conserves, contrib))
    return Catalogue(tuple(sorted(entries, key=lambda e: e.contrib)))
