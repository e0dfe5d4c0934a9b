"""Where a worker is, as it reports to the chief."""

from __future__ import annotations

import dataclasses
import json

from typing_extensions import override


@dataclasses.dataclass(frozen=True)
class Report:
    """Where a worker is.

    Attributes:
        step: Number of steps that it has begun, of any kind, since its process began.
        agreements: Number of `agree` calls that it has begun.
        waits: What it is about to do, if it waits for the others to agree on that.
        last: What was agreed on last.
        ended: Whether its program is over.
        broadcasts: How many bytes of a variable that it creates are under way, if it does.
        failed: Which broadcast failed, and why.
        error: By which error its program has ended, if by one.
        broken: Whether a collective has failed there, and nothing is known of the reason.
        met: The last step in which it has received the messages of all others.
        supplied: Number of steps whose arguments were there, the batch among them.
        asked: Number of batches of finite datasets that it has asked for.
        answered: Number of those requests that its dataset has answered.
        arrived: Number of steps whose gradients were there.
    """

    step: int = 0
    agreements: int = 0
    waits: str | None = None
    last: str = ""
    ended: bool = False
    broadcasts: int | None = None
    failed: str = ""
    error: str = ""
    broken: bool = False
    met: int = 0
    supplied: int = 0
    asked: int = 0
    answered: int = 0
    arrived: int = 0

    @property
    def place(self) -> int:
        """How far it has come: the larger, the further, where all run the same program."""
        return self.step + self.supplied + self.asked + self.answered + self.arrived

    @property
    def lacks_data(self) -> bool:
        """Whether its step has no batch; if it is not behind the others, theirs may be missing."""
        return self.asked > self.answered or self.step > self.supplied

    def to_text(self) -> str:
        """Return this as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Report:
        """Return what `to_text` wrote."""
        return cls(**json.loads(text))

    @override
    def __str__(self):
        if self.ended:
            how = f", by {self.error}" if self.error else ""
            return f"has ended its program, at step {self.step}{how}"
        if self.failed:
            return f"could not {self.failed}"
        if self.waits is not None:
            return f"is at step {self.step} and waits for all workers to: {self.waits}"
        data = " and waits for data" if self.asked > self.answered else ""
        after = f", after: {self.last}" if self.last else ""
        return f"is at step {self.step}{data}{after}"
