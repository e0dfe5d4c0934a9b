"""What makes the parts of all workers one checkpoint: a file that lists them, written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from tf_redsync.checkpoints import files

NAME = "manifest.json"
FORMAT = 1
_CHECKSUM = "checksum"  # of everything else in the file


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

    files.write(directory / NAME, content)


def read(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        Refused: for one that is damaged, or of another format.
    """
    try:
        values = json.loads((directory / NAME).read_bytes())
        written, saved = values.pop("format"), values.pop(_CHECKSUM)
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
    try:
        parts = tuple(Part(**part) for part in values.pop("parts"))
        manifest = Manifest(parts=parts, **values)
    except (KeyError, TypeError) as error:
        raise Refused(f"{NAME} is damaged: {error}") from error
    if saved != checksum(manifest):
        raise Refused(f"{NAME} is damaged: its checksum is another one")
    return manifest


def _values(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(manifest)}


def checksum(manifest: Manifest) -> str:
    """Return what two equal manifests have in common, and no others."""
    return hashlib.sha256(json.dumps(_values(manifest), sort_keys=True).encode()).hexdigest()


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
