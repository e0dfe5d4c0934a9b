"""What a worker that is not the chief does to meet the others (`rendezvous.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from typing_extensions import override

from tf_redsync.cluster import handshake
from tf_redsync.cluster.handshake import Identity, Line, NoAnswer
from tf_redsync.cluster.meeting import (
    OLDER,
    SAME,
    Meeting,
    pauses,
    why_not,
)
from tf_redsync.cluster.tasks import Cluster, StartError

_LOST_SECONDS = 10.0  # without a status from the chief


class Member(Meeting):
    """Joins the chief, and reaches the others when all have."""

    def __init__(self, cluster: Cluster, timeout: float):
        super().__init__(cluster, timeout)
        self._called = asyncio.Event()  # the chief has
        self._line: Line | None = None
        self._waits = [(cluster.name(0), "it has not answered yet")]

    @override
    def waits(self) -> list[tuple[str, str]]:
        return self._waits

    @override
    async def meet(self) -> None:
        seconds = pauses()
        while True:
            try:
                self._line = await self._join()
                await self._stay(self._line)
                return
            except NoAnswer as error:
                why = f"{error}: {OLDER}" if error.serves else str(error)
                self._waits = [(self.cluster.name(0), why)]
                if self._line is not None:
                    self._line.close()
                    self._line = None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._called.wait(), next(seconds))
            self._called.clear()

    @override
    def end(self, text: str) -> None:
        if self._line is not None:
            self._line.tell(end=text)

    @override
    async def greet(self, words: dict[str, Any], line: Line) -> None:
        if words.get("rank") == 0:
            self._called.set()

    async def _join(self) -> Line:
        line = await self.call(self.cluster.addresses[0], join=True)
        try:
            chief = Identity.of(await line.hear())
            differs = self.differs(chief) or (
                "" if chief.rank == 0 else f"it is worker {chief.rank}"
            )
            if differs:
                raise StartError(
                    f"What answers at {self.cluster.addresses[0]} is not worker 0: {differs}. "
                    f"{SAME}"
                )
            words = await line.hear(2 * handshake.ANSWER_SECONDS)
            if "refused" in words:
                raise StartError(str(words["refused"]))
            if "unreached" in words:
                raise NoAnswer(
                    f"it does not reach this worker at {self.cluster.addresses[self.me.rank]}: "
                    f"{words['unreached']}"
                )
        except BaseException:
            line.close()
            raise
        return line

    async def _stay(self, line: Line) -> None:
        """Do as the chief says, until it says that all are there."""
        reaching: asyncio.Task | None = None
        try:
            while True:
                words = await line.hear(_LOST_SECONDS)
                if "end" in words:
                    self._line = None
                    raise StartError(str(words["end"]))
                if "go" in words:
                    self.kept = {self.cluster.name(0): line.kept()}
                    return
                self._waits = [(str(who), str(why)) for who, why in words.get("waits", ())]
                if words.get("joined") and reaching is None:
                    reaching = asyncio.create_task(self._reach_all(line))
        finally:
            if reaching is not None:
                reaching.cancel()

    async def _reach_all(self, line: Line) -> None:
        left = set(range(1, len(self.cluster.addresses))) - {self.me.rank}
        seconds = pauses()
        while True:
            whys = await asyncio.gather(*(why_not(self, rank) for rank in sorted(left)))
            unreached = {r: why for r, why in zip(sorted(left), whys, strict=True) if why}
            line.tell(unreached=[[self.cluster.name(r), why] for r, why in unreached.items()])
            left = set(unreached)
            if not left:
                return
            await asyncio.sleep(next(seconds))
