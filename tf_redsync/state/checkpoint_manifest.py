"""The manifest of a checkpoint: a file that lists the parts of all workers, written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from tf_redsync.state import checkpoint_files

NAME = "manifest.json"
FORMAT = 1
_CHECKSUM = "checksum"  # key of the checksum of all other values in the file
_MOST_BYTES = 1 << 26  # the file has about 100 bytes for each variable and each worker
_COUNTS = ("step", "epoch", "batch", "first_epoch", "finished")


class Refused(ValueError):
    """A checkpoint cannot be used; the message has the reason without the checkpoint's name."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The file of one worker.

    Attributes:
        rank: The worker's rank.
        size: The file's size in bytes.
        sha256: The file's SHA-256 in hexadecimal digits.
        whole: Whether it has all variables of the model and the optimizer, or only those that
            differ from the leader's.
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
    """The content of a manifest.

    Attributes:
        step: Number of steps of the exchange.
        epoch: Epoch in which training resumes, from 0.
        batch: Next batch in this epoch, from 0.
        parts: The part of each worker, by rank.
        subject: Identifies the model and the methods; see `differences` and `changed_options`.
        versions: Versions of the packages that wrote the checkpoint, for debugging.
        first_epoch: Epoch in which training started.
        finished: The number of epochs of a `fit` that ended; 0 while it runs.
        reason: Reason for the save, as text.
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
        """The number of workers in the run that wrote it."""
        return len(self.parts)

    @override
    def __str__(self) -> str:
        place = f"step {self.step}, epoch {self.epoch + 1}, batch {self.batch}"
        return f"{place}, {self.workers} worker{'s' if self.workers > 1 else ''}"


def part_name(rank: int) -> str:
    """Return the file name of a worker's part."""
    return f"part-{rank:05d}.npz"


def write(directory: Path, manifest: Manifest) -> None:
    """Write a manifest, which commits the checkpoint."""
    values = _values(manifest) | {_CHECKSUM: checksum(manifest)}
    text = json.dumps(values, indent=1).encode()

    def content(file: IO[bytes]) -> None:
        file.write(text)

    checkpoint_files.write(directory / NAME, content)


def read(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        Refused: If the manifest is missing, corrupted, of another format, or has invalid values.
    """
    try:
        with checkpoint_files.opened(directory / NAME, _MOST_BYTES) as file:
            values = json.load(file)
        saved = values.pop(_CHECKSUM)
        written, digest = values["format"], _digest(values)
    except OSError as error:
        raise Refused(f"{NAME} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # corrupted JSON may also have other types
        raise Refused(f"{NAME} is corrupted: it is not a JSON object of a manifest") from error
    if written != FORMAT:
        age = "a newer" if isinstance(written, int) and written > FORMAT else "another"
        raise Refused(
            f"{NAME} was written by {age} version of tf_redsync. Received: format={written}; this "
            f"version reads format {FORMAT}"
        )
    if saved != digest:
        raise Refused(f"{NAME} is corrupted: its checksum does not match")
    del values["format"]
    objection = next(_objections(values), None)
    if objection is not None:
        raise Refused(f"{NAME} is malformed: {objection}")
    parts = tuple(Part(**part) for part in values.pop("parts"))
    return Manifest(parts=parts, **values)


def _values(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(manifest)}


def checksum(manifest: Manifest) -> str:
    """Return the SHA-256 of a manifest's values."""
    return _digest(_values(manifest))


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------- the schema


def _objections(values: dict[str, Any]) -> Iterator[str]:
    """Yield the violations of the manifest's schema, as text."""
    names = {field.name for field in dataclasses.fields(Manifest)}
    if values.keys() != names:
        yield f"it must have {sorted(names)}. Received: {sorted(values)}"
    for name in _COUNTS:
        if not _is_count(values[name]):
            yield f"{name} must be an integer from 0. Received: {values[name]!r:.80}"
    if values["first_epoch"] > values["epoch"]:
        yield f"first_epoch={values['first_epoch']} exceeds epoch={values['epoch']}"
    if not isinstance(values["reason"], str) or not _is_texts(values["versions"]):
        yield "reason and versions must be text"
    parts = values["parts"]
    if not isinstance(parts, list) or not parts:
        yield f"parts must be a list with one part per worker. Received: {parts!r:.80}"
    for rank, part in enumerate(parts):
        if not _is_part(part, rank):
            yield f"parts[{rank}] must be a part of rank {rank}. Received: {part!r:.200}"
    if not _is_subject(values["subject"]):
        yield "subject must have kind, variables and a list of options"


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
        and value.keys() == {"kind", "variables", "options"}
        and isinstance(value["options"], list)
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
    """Return the differences between this run's subject and a checkpoint's, as text; `""` if equal.

    A subject has `"kind"`, a dict of texts, and `"variables"`, a dict of lists of
    `[name, dtype, shape]`. The names are for messages only.
    """
    for name, kind in ours["kind"].items():
        other = theirs.get("kind", {}).get(name)
        if other != kind:
            return f"it belongs to another {name}: expected {kind}, received {other}"
    for name, variables in ours["variables"].items():
        others = theirs.get("variables", {}).get(name, [])
        if len(others) != len(variables):
            titles, other_titles = {v[0] for v in variables}, {v[0] for v in others}
            surplus = [f"{title!r:.100}" for title in sorted(map(str, titles ^ other_titles))[:3]]
            return (
                f"it belongs to another {name}, or one with other options: expected "
                f"{len(variables)} variables, received {len(others)}; only one of them has "
                f"{', '.join(surplus) or 'some of the same name'}"
            )
        for (title, *form), (_, *other_form) in zip(variables, others, strict=True):
            if form != other_form:
                (dtype, shape), (other_dtype, other_shape) = form, other_form
                return (
                    f"it belongs to another {name}: expected {title} to be {dtype}{shape}, "
                    f"received {other_dtype}{other_shape}"
                )
    return ""


def changed_options(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the options that differ between this run's subject and a checkpoint's, as text.

    A subject's `"options"` are serialized arguments of each optimizer.
    """
    pairs = zip(ours["options"], theirs["options"], strict=False)
    return [text for now, saved in pairs for text in _changes(now, saved, ())]


def _changes(now: Any, saved: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield each value that differs between two serialized objects, with its path in them."""
    if isinstance(now, dict) and isinstance(saved, dict):
        for key in sorted(now.keys() | saved.keys()):
            name = now.get("class_name", key) if key == "config" else key
            yield from _changes(now.get(key), saved.get(key), (*path, name))
    elif isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        for i, (value, other) in enumerate(zip(now, saved, strict=True)):
            yield from _changes(value, other, (*path, str(i)))
    elif now != saved:
        name = ".".join(path).encode("unicode_escape").decode()
        yield f"{name:.200}: saved {reprlib.repr(saved)}, now {reprlib.repr(now)}"
