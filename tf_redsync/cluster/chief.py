"""What the chief does so that the workers meet (`rendezvous.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

from typing_extensions import override

from tf_redsync.cluster.handshake import Identity, Line, NoAnswer
from tf_redsync.cluster.meeting import (
    OLDER,
    SAME,
    Meeting,
    pauses,
    why_not,
)
from tf_redsync.cluster.tasks import Cluster, StartError, taken

_STATUS_SECONDS = 1.0


@dataclasses.dataclass
class _Joined:
    """A worker at the chief's: its line, and whom it has not reached; `None` before it tried."""

    line: Line
    unreached: list[Any] | None = None


class Chief(Meeting):
    """Worker 0: takes in all others, each once, and says when all have reached all."""

    def __init__(self, cluster: Cluster, timeout: float):
        super().__init__(cluster, timeout)
        others = range(1, len(cluster.addresses))
        self._whys = dict.fromkeys(others, "it has not called yet")
        self._joined: dict[int, _Joined] = {}
        self._changed = asyncio.Event()
        self._ended = ""

    @override
    async def meet(self) -> None:
        searches = [asyncio.create_task(self._search(rank)) for rank in self._whys]
        try:
            while True:
                if self._ended:
                    raise StartError(self._ended)
                joined = len(self._joined) == len(self._whys)
                if joined and all(one.unreached == [] for one in self._joined.values()):
                    return await self._go()
                for one in self._joined.values():
                    one.line.tell(waits=self.waits(), joined=joined)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _STATUS_SECONDS)
                self._changed.clear()
        finally:
            for search in searches:
                search.cancel()

    async def _go(self) -> None:
        for one in self._joined.values():
            one.line.tell(go=True)
        await asyncio.gather(*(one.line.flush() for one in self._joined.values()))
        self.kept = {self.cluster.name(r): one.line.kept() for r, one in self._joined.items()}

    @override
    def end(self, text: str) -> None:
        for one in self._joined.values():
            one.line.tell(end=text)

    @override
    def heard_of_tensorflow(self) -> None:
        for rank in set(self._whys) - set(self._joined):
            if not self._whys[rank].startswith("TensorFlow"):
                self._whys[rank] += f"; TensorFlow calls from somewhere: {OLDER}"

    @override
    def waits(self) -> list[tuple[str, str]]:
        missing = [r for r in self._whys if r not in self._joined]
        if missing:
            return [(self.cluster.name(rank), self._whys[rank]) for rank in missing]
        return [
            (f"worker {rank}, which has to reach {who}", why)
            for rank, one in sorted(self._joined.items())
            for who, why in one.unreached or [("all others", "it has not answered yet")]
            if one.unreached != []
        ]

    async def _search(self, rank: int) -> None:
        """Call a worker until it has joined: to say why not, and that this process is there."""
        seconds = pauses()
        while True:
            if rank not in self._joined:
                self._whys[rank] = await why_not(self, rank) or "it has not joined yet"
            await asyncio.sleep(next(seconds))

    @override
    async def greet(self, words: dict[str, Any], line: Line) -> None:
        if not words.get("join"):
            return
        other = Identity.of(words)
        refused = self._refused(other)
        if not refused:
            try:
                there = await self.ask(self.cluster.addresses[other.rank])
            except NoAnswer as error:
                if not error.serves:
                    self._whys[other.rank] = f"it has called, but there {error}"
                    line.tell(unreached=str(error))
                    return
                refused = self._one_too_many(other, "TensorFlow's server answers")
            else:
                if there.nonce != other.nonce:
                    refused = self._one_too_many(other, "another process answers")
        if refused:
            line.tell(refused=refused)
            return
        await self._take_in(other, line)

    async def _take_in(self, other: Identity, line: Line) -> None:
        if other.rank in self._joined:  # the process that was there before is gone
            self._joined[other.rank].line.close()
        one = self._joined[other.rank] = _Joined(line)
        line.tell(joined=False)
        self._changed.set()
        try:
            while True:
                words = await line.hear(None)
                if "end" in words:
                    self._ended = str(words["end"])
                if "unreached" in words:
                    one.unreached = words["unreached"]
                self._changed.set()
        except NoAnswer as error:
            if self._joined.get(other.rank) is one:
                del self._joined[other.rank]
                self._whys[other.rank] = f"it had joined, and {error}"
                self._changed.set()

    def _refused(self, other: Identity) -> str:
        differs = self.differs(other)
        if differs:
            return (
                f"worker 0 at {self.cluster.addresses[0]} refuses this process: {differs} (seen "
                f"from worker 0). {SAME}"
            )
        if not 0 < other.rank < len(self.cluster.addresses):
            return f"worker 0 is the chief, and this process is not. Received: rank={other.rank}"
        return ""

    def _one_too_many(self, other: Identity, how: str) -> str:
        cluster = dataclasses.replace(self.cluster, rank=other.rank)
        address = self.cluster.addresses[other.rank]
        return str(taken(cluster, f"worker 0 finds that {how} at {address}, not this one"))
