"""A part of a save, as `worker_state.capture` makes it, when it is read again: is it one at all?

What goes on with it is in `restoring.py`. Parts are data from files, so all of it is looked at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

FORMAT = 1
_SCALARS = ("format", "rank", "workers", "rows")


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that was read, and looks like one.

    Attributes:
        rank: Of the process that it is of.
        workers: Number of the exchange's workers then.
        rows: How many of them that process was.
        about: See the module.
        arrays: The rest, by name.
    """

    rank: int
    workers: int
    rows: int
    about: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Part:
        """Read what `capture` returned.

        Raises:
            ValueError: for anything else.
        """
        missing = [n for n in (*_SCALARS, "about", "step") if n not in found]
        if missing:
            raise ValueError(
                "`parts` must be what `worker_state` returned. Received: a part without "
                f"{', '.join(missing)}; it has {len(found)} arrays."
            )
        arrays = {name: _numeric(name, value) for name, value in found.items()}
        numbers = {name: _counter(name, arrays.pop(name)) for name in _SCALARS}
        if numbers.pop("format") != FORMAT:
            raise ValueError(
                f"the part is of format {int(found['format'])}, and this version of tf_redsync "
                f"reads format {FORMAT}. Load it with the version that saved it."
            )
        part = cls(**numbers, about=_json(arrays.pop("about")), arrays=arrays)
        part.check()
        return part

    def check(self) -> None:
        """Check that it can be what it says it is.

        Raises:
            ValueError: if not.
        """
        if not self.rows or not self.workers or (self.rank + 1) * self.rows > self.workers:
            raise ValueError(
                f"the part says it is of process {self.rank}, {self.rows} of {self.workers} "
                "workers, which cannot be."
            )
        kinds = self.about.get("kinds")
        if not isinstance(kinds, dict) or set(kinds) != set(self.arrays):
            raise ValueError(
                "the part's arrays are not those that it says it has. Received: "
                f"{len(self.arrays)} arrays. Is it a mixture of two?"
            )
        for name, array in self.arrays.items():
            if kinds[name] != "shared" and (not array.ndim or len(array) != self.rows):
                raise ValueError(
                    f"{name!r} of the part must have {self.rows} rows. Received: shape="
                    f"{array.shape}"
                )

    @cached_property
    def step(self) -> int:
        """The step at which it was saved."""
        return _counter("step", self.arrays["step"])

    @property
    def ranks(self) -> range:
        """Of the exchange's workers that are in it."""
        return range(self.rank * self.rows, (self.rank + 1) * self.rows)

    @property
    def apart(self) -> bool:
        """Whether the weights were each worker's own."""
        return any(name.startswith("consensus/own/") for name in self.arrays)

    def row(self, name: str, rank: int) -> np.ndarray:
        """Return what a worker of the exchange has under a name."""
        array = self.arrays[name]
        return array if self.about["kinds"][name] == "shared" else array[rank - self.ranks.start]

    def save(self) -> dict[str, Any]:
        """What must be equal in all parts of one save, in short."""
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self.arrays):
            digest.update(name.encode())
            if self.about["kinds"][name] == "shared":
                array = self.arrays[name]
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return {
            "step": self.step,
            "run": str(self.about.get("run")),
            "workers": self.workers,
            "rows": self.rows,
            "what all share": digest.hexdigest(),
        }


def _numeric(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name!r} of a part must be an array of numbers. Received: dtype={array.dtype}"
        )
    return array


def _counter(name: str, array: np.ndarray) -> int:
    if array.shape or array.dtype.kind not in "iu" or int(array) < 0:
        raise ValueError(f"{name!r} of a part must be an integer from 0. Received: {array!r}")
    return int(array)


def _json(array: np.ndarray) -> dict[str, Any]:
    try:
        found = json.loads(array.astype(np.uint8).tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'about' of a part must be JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"'about' of a part must be a JSON object. Received: {type(found)}")
    return found
