"""What parts of a save must be like to be restored; see `restoring.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_redsync.state.capture import PENDING, Entry
from tf_redsync.state.snapshot import Part

MOST = 5  # names in a message


class AnotherState(ValueError):
    """A saved state is of another model or method."""


def another(
    who: str,
    different: Sequence[str],
    expected: Mapping[str, Entry],
    one: Mapping[str, np.ndarray],
) -> str:
    """Return what is to be said of a state of another model or method.

    Args:
        who: The part.
        different: Names that are missing, too many, or of another shape.
        expected: What there should be.
        one: What there is, of one worker.
    """

    def shapes(name: str) -> str:
        wanted = expected[name].shape if name in expected else "nothing"
        received = one[name].shape if name in one else "nothing"
        return f"{name}: expected {wanted}, received {received}"

    more = f"; and {len(different) - MOST} more" if len(different) > MOST else ""
    return (
        f"{who} is of another model or method: {'; '.join(map(shapes, different[:MOST]))}{more}. "
        "Use the model and the method that were saved, or load with compile=False and compile anew."
    )


def check_array(who: str, name: str, array: np.ndarray, entry: Entry) -> None:
    """Check the dtype and the numbers of one worker's array.

    Raises:
        ValueError: for another dtype, or numbers that are not finite.
    """
    if array.dtype != entry.dtype:
        raise ValueError(
            f"{who} must have {name!r} of dtype {entry.dtype}. Received: dtype={array.dtype}"
        )
    numbers = entry.numbers(array)
    if numbers.dtype.kind not in "biu" and f"/{PENDING}/" not in name:
        bad = int(np.size(numbers) - np.isfinite(np.asarray(numbers, np.float32)).sum())
        if bad:
            raise ValueError(
                f"{who} has {bad} numbers that are not finite in {name!r}. The file is damaged: "
                "load an earlier one."
            )


def check_counters(who: str, part: Part, exchange: Any) -> None:
    """Check counters that all workers share.

    Raises:
        ValueError: for those that no training leads to.
    """
    counters = [n for n, a in part.arrays.items() if not a.shape and a.dtype.kind == "i"]
    # What methods count is theirs: it may begin below 0.
    found = {n: int(part.arrays[n]) for n in counters if not n.startswith("bucket_")}
    bounds = {"skipped_in_a_row": found.get("skipped"), "trial/verdict": 2, "trial/delivered": 1}
    if exchange.schedule.own_steps:
        bounds["consensus/steps"] = exchange.schedule.most_steps
    for name, value in found.items():
        most = bounds.get(name)
        if value < 0 or (most is not None and value > most):
            raise ValueError(
                f"{who} must have {name!r} from 0{'' if most is None else f' to {most}'}. "
                f"Received: {value}. The file is damaged: load an earlier one."
            )


def may_be_dropped(exchange: Any) -> bool:
    """Whether a state of another form is a matter of course; see `saved_state.restore`."""
    return exchange.resolved is not exchange.policy


def one_save(brought: list[list[Any]]) -> dict[str, Any]:
    """Return what all parts have in common.

    Raises:
        ValueError: for parts of different saves.
    """
    listed = [(p, rank, save) for p, parts in enumerate(brought) for rank, save in parts]
    first = listed[0]
    for found in listed:
        different = [key for key in first[2] if found[2][key] != first[2][key]]
        if different:
            told = [
                f"the part of rank {rank} on worker {process} has "
                + ", ".join(f"{key} {save[key]}" for key in different)
                for process, rank, save in (first, found)
            ]
            raise ValueError(
                f"the parts are not of one save: {'; '.join(told)}. Load the parts that were "
                "written at the same step of the same run."
            )
    return first[2]


def missing_parts(missing: Sequence[int], workers: int) -> str:
    """Return what is to be said where nobody has brought the parts of some ranks."""
    more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
    some = ", ".join(map(str, missing[:MOST])) + more
    return (
        f"the exchange's state was saved by {workers} workers, and the parts of the ranks {some} "
        "are missing: what these had not delivered yet is lost, and the rest is used. To keep all "
        "of it let every worker save to a path of its own and load it again; see docs/saving.md."
    )
