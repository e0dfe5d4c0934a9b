"""What makes the parts of all workers one checkpoint: a file that lists them, written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from tf_redsync.state import checkpoint_files

NAME = "manifest.json"
FORMAT = 1
_CHECKSUM = "checksum"  # of everything else in the file
_MOST_BYTES = 1 << 26  # of the file: 100 bytes for each variable, and as many for each worker
_COUNTS = ("step", "epoch", "batch", "first_epoch", "finished")


class Refused(ValueError):
    """A checkpoint that cannot be used; the text says why, without its name."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The file of one worker.

    Attributes:
        rank: Of the worker.
        size: In bytes.
        sha256: Of the file.
        whole: Whether the model's and the optimizer's variables are all in it; otherwise there are
            only those that differ from another worker's.
    """

    rank: int
    size: int
    sha256: str
    whole: bool

    @property
    def name(self) -> str:
        """The file's name."""
        return part_name(self.rank)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of.

    Attributes:
        step: Steps of the exchange, or of the optimizer where there is none.
        epoch: Epoch that training goes on with, from 0.
        batch: Batch in this epoch that comes next, from 0.
        parts: One for each worker, by rank.
        subject: What it must be the same model and method by; see `differences`.
        versions: Of the packages that wrote it, for whoever looks for a reason.
        first_epoch: With which training began.
        finished: The number of epochs of a `fit` that ended; 0 while it goes on.
        reason: Why it was saved.
    """

    step: int
    epoch: int
    batch: int
    parts: tuple[Part, ...]
    subject: dict[str, Any]
    versions: dict[str, str]
    first_epoch: int = 0
    finished: int = 0
    reason: str = ""

    @property
    def workers(self) -> int:
        """Their number, in the run that wrote it."""
        return len(self.parts)

    @override
    def __str__(self) -> str:
        place = f"step {self.step}, epoch {self.epoch + 1}, batch {self.batch}"
        return f"{place}, {self.workers} worker{'s' if self.workers > 1 else ''}"


def part_name(rank: int) -> str:
    """The name of a worker's file."""
    return f"part-{rank:05d}.npz"


def write(directory: Path, manifest: Manifest) -> None:
    """Commit a checkpoint: from now on it exists."""
    values = _values(manifest) | {_CHECKSUM: checksum(manifest)}
    text = json.dumps(values, indent=1).encode()

    def content(file: IO[bytes]) -> None:
        file.write(text)

    checkpoint_files.write(directory / NAME, content)


def read(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        Refused: for one that is damaged, of another format, or with values that no save has.
    """
    try:
        with checkpoint_files.opened(directory / NAME, _MOST_BYTES) as file:
            values = json.load(file)
        saved = values.pop(_CHECKSUM)
        written, digest = values["format"], _digest(values)
    except OSError as error:
        raise Refused(f"{NAME} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # json and whatever it made of other bytes
        raise Refused(f"{NAME} is damaged: it is not what was written") from error
    if written != FORMAT:
        age = "a newer" if isinstance(written, int) and written > FORMAT else "another"
        raise Refused(
            f"it was written by {age} version of tf_redsync, in format {written}, and this one "
            f"reads format {FORMAT}"
        )
    if saved != digest:
        raise Refused(f"{NAME} is damaged: its checksum is another one")
    del values["format"]
    objection = next(_objections(values), None)
    if objection is not None:
        raise Refused(f"{NAME} is not one that a save writes: {objection}")
    parts = tuple(Part(**part) for part in values.pop("parts"))
    return Manifest(parts=parts, **values)


def _values(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(manifest)}


def checksum(manifest: Manifest) -> str:
    """Return what two equal manifests have in common, and no others."""
    return _digest(_values(manifest))


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------- the schema


def _objections(values: dict[str, Any]) -> Iterator[str]:
    """Say what is wrong with the values of a file, the first thing first."""
    names = {field.name for field in dataclasses.fields(Manifest)}
    if values.keys() != names:
        yield f"it has {sorted(values)}, and not {sorted(names)}"
    for name in _COUNTS:
        if not _is_count(values[name]):
            yield f"{name} must be an integer from 0. Received: {values[name]!r:.80}"
    if values["first_epoch"] > values["epoch"]:
        yield f"first_epoch={values['first_epoch']} is after epoch={values['epoch']}"
    if not isinstance(values["reason"], str) or not _is_texts(values["versions"]):
        yield "reason and versions must be text"
    parts = values["parts"]
    if not isinstance(parts, list) or not parts:
        yield f"parts must be a list with one part for each worker. Received: {parts!r:.80}"
    for rank, part in enumerate(parts):
        if not _is_part(part, rank):
            yield f"part {rank} must be of rank {rank}. Received: {part!r:.200}"
    if not _is_subject(values["subject"]):
        yield "its subject must have kinds and variables"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_part(value: Any, rank: int) -> bool:
    names = {field.name for field in dataclasses.fields(Part)}
    return (
        isinstance(value, dict)
        and value.keys() == names
        and type(value["rank"]) is int
        and value["rank"] == rank
        and _is_count(value["size"])
        and isinstance(value["sha256"], str)
        and re.fullmatch("[0-9a-f]{64}", value["sha256"]) is not None
        and type(value["whole"]) is bool
    )


def _is_subject(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"kind", "variables"}
        and _is_texts(value["kind"])
        and isinstance(value["variables"], dict)
        and all(isinstance(listed, list) for listed in value["variables"].values())
        and all(_is_variable(v) for listed in value["variables"].values() for v in listed)
    )


def _is_variable(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    title, dtype, shape = value
    return (
        isinstance(title, str)
        and isinstance(dtype, str)
        and isinstance(shape, list)
        and all(type(n) is int and n >= -1 for n in shape)
    )


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Say by what two subjects are of another model or method, or `""`.

    A subject has `"kind"`: texts by what they are of, and `"variables"`: `[name, dtype, shape]` by
    what they are of; names are for the message only.
    """
    for name, kind in ours["kind"].items():
        other = theirs.get("kind", {}).get(name)
        if other != kind:
            return f"it is of another {name}: {other}, and not {kind}"
    for name, variables in ours["variables"].items():
        others = theirs.get("variables", {}).get(name, [])
        if len(others) != len(variables):
            return f"it is of another {name}, with {len(others)} variables and not {len(variables)}"
        for (title, *form), (_, *other_form) in zip(variables, others, strict=True):
            if form != other_form:
                (dtype, shape), (other_dtype, other_shape) = form, other_form
                return (
                    f"it is of another {name}: {title} is {other_dtype}{other_shape} in it, and "
                    f"{dtype}{shape} here"
                )
    return ""
