"""Membership of an elastic job: the nodes that train together, and reactions to changes.

A *node* is the launcher of one host, and a *round* is one start of the workers of some nodes. This
module has no input or output: `node_rendezvous.py` passes messages, lost connections and the time
in, and `send` carries messages out. A job is always in one of four states:

* joining: nodes join. The round starts when `maximum` nodes are ready, or when `minimum` are ready
  and no other has joined for `JOIN_SECONDS`.
* running: a node that joins waits. The other nodes are asked for a checkpoint, unless the round has
  `maximum` nodes.
* ending: a worker failed, a node was lost, or a checkpoint was made. The workers of all nodes end.
* over: every node gets the job's exit code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from tf_redsync import stopping
from tf_redsync.version import __version__

JOIN_SECONDS = 5.0  # without another node, after which a round starts below the maximum
LOST_SECONDS = 10.0  # without a heartbeat, after which a node or the rendezvous is lost
NO_ROUND_EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h

Send = Callable[..., None]


class Refused(Exception):
    """A node cannot take part; the message is for its user."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all nodes of a job must share.

    Attributes:
        minimum: Number of nodes that a round needs.
        maximum: Number of nodes that a round may have.
        max_restarts: Number of restarts after failures of workers.
        version: Version of tf_redsync.
    """

    minimum: int
    maximum: int
    max_restarts: int
    version: str = __version__

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> Settings:
        """Return the settings in a message; raise `Refused` for a malformed one."""
        values = [words.get(field.name) for field in dataclasses.fields(cls)]
        if not all(type(value) is int for value in values[:3]) or not isinstance(values[3], str):
            raise Refused("the message of this node is malformed: another version of tf_redsync?")
        return cls(*values)  # type: ignore[arg-type]

    @override
    def __str__(self) -> str:
        return (
            f"--nodes {self.minimum}:{self.maximum} --max-restarts {self.max_restarts}, "
            f"tf_redsync {self.version}"
        )


@dataclasses.dataclass(frozen=True)
class Round:
    """One start of the workers of some nodes.

    Attributes:
        number: Counts rounds from 0; `TF_REDSYNC_RESTART` of the workers.
        nodes: Keys of the nodes, in the order of their workers' ranks.
        addresses: "host:port" of each node's workers.
        failures: Number of rounds so far that ended by the failure of a worker.
    """

    number: int
    nodes: tuple[str, ...]
    addresses: tuple[tuple[str, ...], ...]
    failures: int

    @classmethod
    def of(cls, words: Any) -> Round:
        """Return the round in a message; raise `Refused` for a malformed one."""
        try:
            number, failures = words["number"], words["failures"]
            nodes = tuple(words["nodes"])
            addresses = tuple(tuple(each) for each in words["addresses"])
            texts = [*nodes, *(text for each in addresses for text in each)]
            good = type(number) is int and type(failures) is int and len(nodes) == len(addresses)
            if not (good and nodes and all(isinstance(text, str) for text in texts)):
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise Refused("the description of a round is malformed") from None
        return cls(number, nodes, addresses, failures)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of all workers, by rank."""
        return tuple(address for each in self.addresses for address in each)

    def ranks(self, node: str) -> range:
        """Return the ranks of a node's workers."""
        at = self.nodes.index(node)
        first = sum(len(each) for each in self.addresses[:at])
        return range(first, first + len(self.addresses[at]))


@dataclasses.dataclass
class Node:
    """A connected node.

    Attributes:
        key: Random text, unique to the launcher process.
        name: Its host and process, for messages.
        host: Host of its workers' addresses.
        send: Sends it a message.
        ready: Addresses of its workers in the next round; empty while it is not ready.
        leaves: Whether it ends after this round.
    """

    key: str
    name: str
    host: str
    send: Send
    ready: tuple[str, ...] = ()
    leaves: bool = False


@dataclasses.dataclass(frozen=True)
class _Report:
    """Outcome of a node's workers in a round.

    Attributes:
        code: Exit code of the node's workers.
        failed: Whether a worker failed by itself.
        cause: A line with the first failure.
        victim: Whether the first failure is a consequence of another worker's end.
    """

    code: int
    failed: bool
    cause: str
    victim: bool


class Membership:
    """The nodes of one job and their rounds.

    Args:
        timeout: Seconds that nodes wait for the minimum.
        now: The time in seconds of a monotonic clock; every method receives the current one.
        say: Prints a line about the job.

    Attributes:
        over: Exit code and message of the job when it is over.
        round: The running or ending round.
    """

    def __init__(self, timeout: float, now: float, say: Callable[[str], None]):
        self.over: tuple[int, str] | None = None
        self.round: Round | None = None
        self._timeout = timeout
        self._say = say
        self._settings: Settings | None = None
        self._nodes: dict[str, Node] = {}
        self._names: dict[str, str] = {}
        self._order: tuple[str, ...] = ()  # nodes of the last round, in the order of ranks
        self._number = 0  # number of the next round
        self._led = False  # whether this rendezvous has led a round
        self._failures = 0
        self._since = now  # time at which the nodes began to join
        self._last_joined = now
        self._ending = ""  # "failed", "lost" or "checkpoint"
        self._reports: dict[str, _Report] = {}
        self._regrouping = False
        self._obstacle = ""  # reason why no checkpoint can be requested
        self._expected_until: float | None = None  # deadline of the nodes of an adopted round

    # ------------------------------------------------------------------------------------ events

    def join(self, words: Mapping[str, Any], send: Send, now: float) -> Node:
        """Add a node that has connected or reconnected.

        Args:
            words: The node's first message.
            send: Sends the node a message.
            now: The time.

        Returns:
            The node.

        Raises:
            Refused: `words` are malformed, or the node's settings differ from the other nodes'.
        """
        settings = Settings.of(words)
        key, host, process = (words.get(name) for name in ("node", "host", "process"))
        if not (isinstance(key, str) and isinstance(host, str) and isinstance(process, int)):
            raise Refused("the message of this node is malformed: another version of tf_redsync?")
        claimed = Round.of(words["round"]) if words.get("round") else None
        rounds, failures = words.get("rounds"), words.get("failures")
        if type(rounds) is not int or type(failures) is not int:
            raise Refused("the message of this node is malformed: another version of tf_redsync?")
        if not self._led:  # the node has the counts of an earlier rendezvous
            self._number, self._failures = (
                max(self._number, rounds),
                max(self._failures, failures),
            )
        if self._settings not in (None, settings):
            raise Refused(
                f"the other nodes have {self._settings}. Start all nodes with the same. Received: "
                f"{settings}"
            )
        self._settings = settings
        node = Node(key, f"{host} (process {process})", host, send)
        self._nodes[key], self._names[key] = node, node.name
        if self.over is not None:
            send(end=self.over[0], text=self.over[1])
        elif claimed is not None:
            self._attach(node, claimed, now)
        return node

    def lose(self, node: Node, now: float) -> None:
        """Remove a node whose connection is lost."""
        if self._nodes.get(node.key) is not node:  # the node has reconnected
            return
        del self._nodes[node.key]
        if self.over is not None:
            return
        if self.round is None or node.key not in self.round.nodes:
            if not node.leaves:
                self._say(f"node {node.name} has gone.")
        elif node.key not in self._reports:
            self._end_round("lost", f"node {node.name} is lost")
        self._conclude(now)

    def receive(self, node: Node, words: Mapping[str, Any], now: float) -> None:
        """Handle a message of a node.

        Raises:
            Refused: `words` are malformed.
        """
        handlers: dict[str, Callable[[Node, Mapping[str, Any], float], None]] = {
            "ready": self._note_ready,
            "failing": self._note_failing,
            "ended": self._note_ended,
            "leaves": self._note_leaves,
            "obstacle": self._note_obstacle,
            "alive": lambda node, words, now: None,
        }
        try:
            kind = words["kind"]
            handlers[kind](node, words, now)
        except (KeyError, TypeError, ValueError):
            raise Refused(f"the node {node.name} has sent a malformed message") from None

    def tick(self, now: float) -> None:
        """Run due actions: start a round, request a checkpoint, or end the job."""
        if self.over is not None:
            return
        if self._expected_until is not None and now >= self._expected_until:
            self._expected_until = None
            self._end_without_absent(now)
        if self.round is None:
            self._gather(now)
        elif not self._ending and not self._regrouping and self._waiting():
            settled = now - self._last_joined >= JOIN_SECONDS
            if settled and len(self.round.nodes) < self._limits.maximum and not self._reports:
                self._regroup()

    def status(self, node: Node) -> str:
        """Return the text for a node about what it waits for; empty if it does not wait."""
        if not node.ready or self.over is not None:
            return ""
        if self.round is None:
            return self._gathering()
        if len(self.round.nodes) >= self._limits.maximum:
            return (
                f"the job runs on {len(self.round.nodes)} nodes, its maximum; this node replaces "
                "one that is lost"
            )
        if self._obstacle:
            return f"this node joins at the next checkpoint, but {self._obstacle}"
        return "the job is running; this node joins at the next checkpoint, which is asked for"

    # ------------------------------------------------------------------------------ the messages

    def _note_ready(self, node: Node, words: Mapping[str, Any], now: float) -> None:
        ports = words["ports"]
        if not ports or not all(type(port) is int and 0 < port < 65536 for port in ports):
            raise ValueError
        host = f"[{node.host}]" if ":" in node.host else node.host
        mine = tuple(f"{host}:{port}" for port in ports)
        taken = {a for other in self._nodes.values() if other is not node for a in other.ready}
        if taken.intersection(mine):
            node.send(taken=True)
            return
        node.ready = mine
        self._last_joined = now
        if self.round is not None and node.key in self.round.nodes:
            if node.key not in self._reports:  # its report was lost with a connection
                self._reports[node.key] = _Report(1, False, "", False)
                self._end_round("lost", f"node {node.name} has ended its workers")
            self._conclude(now)

    def _note_failing(self, node: Node, words: Mapping[str, Any], now: float) -> None:
        if self._is_in_round(node, words["round"]):
            self._end_round("failed", f"a worker of node {node.name} failed", but=node)

    def _note_ended(self, node: Node, words: Mapping[str, Any], now: float) -> None:
        report = _Report(
            int(words["code"]), bool(words["failed"]), str(words["cause"]), bool(words["victim"])
        )
        if not self._is_in_round(node, words["round"]):
            return
        self._reports[node.key] = report
        if report.failed:
            self._end_round("failed", f"a worker of node {node.name} failed")
        elif report.code == stopping.EXIT_CODE:
            self._end_round("checkpoint", "a checkpoint was made", saves=True)
        elif report.code:
            self._end_round("lost", f"node {node.name} ends with exit code {report.code}")
        self._conclude(now)

    def _note_leaves(self, node: Node, words: Mapping[str, Any], now: float) -> None:
        node.leaves, node.ready = True, ()
        self._say(f"node {node.name} leaves.")

    def _note_obstacle(self, node: Node, words: Mapping[str, Any], now: float) -> None:
        self._obstacle = str(words["why"])

    # --------------------------------------------------------------------------------- the rounds

    @property
    def _limits(self) -> Settings:
        assert self._settings is not None
        return self._settings

    def _is_in_round(self, node: Node, number: object) -> bool:
        current = self.round
        return current is not None and number == current.number and node.key in current.nodes

    def _waiting(self) -> list[Node]:
        """Return the nodes that are ready for a round, the last round's in their order first."""
        old = [self._nodes[key] for key in self._order if key in self._nodes]
        new = [node for key, node in self._nodes.items() if key not in self._order]
        return [node for node in (*old, *new) if node.ready]

    def _gather(self, now: float) -> None:
        ready = self._waiting()
        late = now - self._since >= self._timeout
        if self._settings is None or len(ready) < self._limits.minimum:
            if late:
                self._finish(
                    NO_ROUND_EXIT_CODE,
                    f"no round began within {self._timeout:g} s: {self._gathering()}. Start more "
                    "nodes, or pass a smaller --nodes or a larger --rendezvous-timeout",
                )
            return
        if not late and len(ready) < sum(not node.leaves for node in self._nodes.values()):
            return  # the other nodes' workers are ending
        if len(ready) >= self._limits.maximum or now - self._last_joined >= JOIN_SECONDS:
            self._start(ready[: self._limits.maximum])

    def _gathering(self) -> str:
        ready = self._waiting()
        names = f" ({', '.join(node.name for node in ready)})" if ready else ""
        if self._settings is None:
            return "no node has called"
        lacking = self._limits.minimum - len(ready)
        if lacking > 0:
            gone = [self._names[key] for key in self._order if key not in self._nodes]
            lost = f"; lost: {', '.join(gone)}" if gone else ""
            return (
                f"{len(ready)} of at least {self._limits.minimum} nodes are here{names}{lost}; "
                f"{lacking} more needed"
            )
        return f"{len(ready)} nodes are here{names}; waiting {JOIN_SECONDS:g} s for others"

    def _start(self, nodes: list[Node]) -> None:
        keys, addresses = tuple(n.key for n in nodes), tuple(n.ready for n in nodes)
        self._led = True
        self.round = Round(self._number, keys, addresses, self._failures)
        self._order = keys
        names = ", ".join(node.name for node in nodes)
        self._say(
            f"round {self._number} starts with {len(nodes)} nodes, "
            f"{len(self.round.workers)} workers: {names}"
        )
        for node in nodes:
            node.ready = ()
            node.send(round=dataclasses.asdict(self.round))

    def _regroup(self) -> None:
        assert self.round is not None
        self._regrouping = True
        names = ", ".join(node.name for node in self._waiting())
        self._say(f"{names} can join: a checkpoint is asked for.")
        for key in self.round.nodes:
            if key in self._nodes:
                self._ask_for_checkpoint(self._nodes[key], self.round)

    def _ask_for_checkpoint(self, node: Node, running: Round) -> None:
        node.send(regroup=running.number, asks=node.key == running.nodes[0])

    def _end_round(
        self, outcome: str, why: str, but: Node | None = None, saves: bool = False
    ) -> None:
        """End the round: stop the workers of all nodes.

        Args:
            outcome: Kind of the end, see `_ending`; the first one counts.
            why: The reason as text.
            but: A node that has ended the round itself, so it receives no message.
            saves: Whether the workers may be saving a checkpoint.
        """
        if self._ending or self.round is None:
            return
        self._ending = outcome
        self._say(f"round {self.round.number} ends: {why}.")
        for key in self.round.nodes:
            node = self._nodes.get(key)
            report = self._reports.get(key)
            waits = report is None or not report.code  # a node that has finished waits for others
            if node is not None and node is not but and waits:
                node.send(stop=self.round.number, why=why, saves=saves)

    def _conclude(self, now: float) -> None:
        """End the job or start the next round, once the workers of all nodes have ended."""
        if self.round is None:
            return
        present = [key for key in self.round.nodes if key in self._nodes]
        if any(key not in self._reports for key in present):
            return
        if not self._ending:
            if len(self._reports) == len(self.round.nodes):
                self._finish(0, "all workers have finished")
            return
        gone = len(present) < len(self.round.nodes)
        leaves = any(self._nodes[key].leaves for key in present)
        if self._ending == "checkpoint" and not (gone or leaves or self._regrouping):
            self._finish(stopping.EXIT_CODE, "the workers stopped on request, with a checkpoint")
        elif self._ending != "failed" or not self._count_failure(gone):
            self._next_round(now)

    def _count_failure(self, gone: bool) -> bool:
        """Count the failure of a worker; return whether the job is over."""
        failed = [report for report in self._reports.values() if report.failed]
        culprits = [report for report in failed if not report.victim]
        if gone and not culprits:  # the workers failed because a node was lost
            return False
        first = (culprits or failed)[0] if failed else _Report(1, True, "a worker failed", False)
        self._failures += 1
        left = self._limits.max_restarts - self._failures
        if left >= 0:
            self._say(f"{first.cause}; {left} restart{'s' if left != 1 else ''} left.")
            return False
        self._finish(first.code, f"{first.cause}; --max-restarts {self._limits.max_restarts}")
        return True

    def _next_round(self, now: float) -> None:
        assert self.round is not None
        self._order = self.round.nodes
        self._number = self.round.number + 1
        self.round, self._ending, self._regrouping, self._obstacle = None, "", False, ""
        self._reports = {}
        self._since = self._last_joined = now

    def _finish(self, code: int, text: str) -> None:
        self.over = code, text
        self._say(f"{text}. Exit code {code}.")
        for node in self._nodes.values():
            node.send(end=code, text=text)

    # ------------------------------------------------------------ takeover from a lost rendezvous

    def _attach(self, node: Node, claimed: Round, now: float) -> None:
        """Let a reconnected node continue its round, or stop it."""
        if self.round is None and not self._led:
            self._led, self.round = True, claimed
            self._order, self._failures = claimed.nodes, claimed.failures
            self._names = dict(zip(claimed.nodes, claimed.nodes, strict=True)) | self._names
            self._expected_until = now + LOST_SECONDS
            self._say(f"round {claimed.number} is running; this rendezvous takes it over.")
        if self.round != claimed or self._ending:
            why = "the other nodes have ended this round"
            node.send(stop=claimed.number, why=why, saves=False)
        elif self._regrouping:  # the request may have been lost with the connection
            self._ask_for_checkpoint(node, claimed)

    def _end_without_absent(self, now: float) -> None:
        """End an adopted round if one of its nodes has not reconnected in time."""
        if self.round is None:
            return
        absent = [key for key in self.round.nodes if key not in self._nodes]
        if absent:
            addresses = [self.round.addresses[self.round.nodes.index(key)][0] for key in absent]
            self._end_round("lost", f"the nodes of {', '.join(addresses)} have not come back")
            self._conclude(now)
