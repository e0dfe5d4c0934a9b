"""Rounds of an elastic job, without processes, sockets and waiting: time is an argument."""

import dataclasses

import pytest

from tf_redsync import stopping
from tf_redsync.cli.membership import (
    JOIN_SECONDS,
    LOST_SECONDS,
    NO_ROUND_EXIT_CODE,
    Membership,
    Refused,
    Round,
    Settings,
)

TIMEOUT = 60.0


class Peer:
    """A node, as seen by the rendezvous."""

    def __init__(self, job, name, claimed=None, rounds=0, failures=0, **settings):
        self.job, self.name, self.got = job, name, []
        words = dataclasses.asdict(Settings(**{**job.settings, **settings}))
        words |= {"node": name, "host": f"10.0.0.{len(job.peers) + 1}", "process": 1}
        words["round"] = claimed and dataclasses.asdict(claimed)
        words |= {"rounds": rounds, "failures": failures}
        job.peers.append(self)
        self.node = job.membership.join(words, lambda **got: self.got.append(got), job.now)

    def say(self, kind, **words):
        self.job.membership.receive(self.node, {"kind": kind, **words}, self.job.now)

    def ready(self, port=20000):
        self.say("ready", ports=[port])
        return self

    def ended(self, code=0, cause="", victim=False, number=None, failed=None):
        number = self.round.number if number is None else number
        failed = bool(cause) if failed is None else failed
        self.say("ended", round=number, code=code, failed=failed, cause=cause, victim=victim)

    def lost(self):
        self.job.membership.lose(self.node, self.job.now)

    def last(self, word):
        """Returns the last message that contains a word."""
        return next((got[word] for got in reversed(self.got) if word in got), None)

    @property
    def round(self):
        words = self.last("round")
        return words and Round.of(words)

    @property
    def rank(self):
        return self.round.ranks(self.name)[0]


class Job:
    def __init__(self, minimum=2, maximum=3, max_restarts=0):
        self.settings = {"minimum": minimum, "maximum": maximum, "max_restarts": max_restarts}
        self.now, self.log, self.peers = 0.0, [], []
        self.membership = Membership(TIMEOUT, 0.0, self.log.append)

    def wait(self, seconds=0.1):
        self.now += seconds
        self.membership.tick(self.now)

    def started(self, *names):
        """Returns the peers with which a round has started."""
        peers = [Peer(self, name).ready() for name in names]
        self.wait(JOIN_SECONDS)
        assert all(len(peer.round.nodes) == len(names) for peer in peers)
        return peers


def test_round_starts_at_once_with_max_and_after_a_pause_with_min():
    job = Job()
    a = Peer(job, "a").ready()
    job.wait(JOIN_SECONDS)
    assert a.round is None and "1 of at least 2" in job.membership.status(a.node)
    b = Peer(job, "b").ready()
    job.wait(JOIN_SECONDS - 0.2)
    assert a.round is None
    c = Peer(job, "c").ready()
    job.wait()
    assert a.round == b.round == c.round and a.round.number == 0
    assert [peer.rank for peer in (a, b, c)] == [0, 1, 2]
    assert a.round.workers == ("10.0.0.1:20000", "10.0.0.2:20000", "10.0.0.3:20000")
    two = Job()
    d, e = two.started("d", "e")
    assert (d.rank, e.rank) == (0, 1)


def test_survivors_keep_their_order_and_a_lost_node_costs_no_restart():
    job = Job(max_restarts=0)
    a, b, c = job.started("a", "b", "c")
    a.lost()
    assert b.last("stop") == c.last("stop") == 0
    b.ended(1, "worker 1 failed first: UnavailableError: gone", victim=True)
    c.ready()  # before its report: no round starts
    job.wait(2 * JOIN_SECONDS)
    assert b.round.number == 0
    b.ready()
    job.wait(JOIN_SECONDS)
    assert (b.rank, c.rank, b.round.number) == (0, 1, 1) and job.membership.over is None


def test_finished_node_joins_the_next_round_after_a_loss():
    job = Job(minimum=1)
    a, b = job.started("a", "b")
    a.ended(0)
    b.lost()
    assert a.last("stop") == 0  # for which a finished node waits
    a.ready()
    job.wait(JOIN_SECONDS)
    assert a.round.number == 1 and job.membership.over is None


def test_failed_worker_costs_a_restart_and_the_first_cause_is_named():
    job = Job(max_restarts=1)
    a, b = job.started("a", "b")
    b.say("failing", round=0)
    assert a.last("stop") == 0 and b.last("stop") is None
    for _ in range(2):
        b.ended(1, "worker 1 failed first: worker 0 has failed: x", victim=True)
        a.ended(3, "worker 0 failed first: ValueError: mine")
        a.ready(), b.ready()
        job.wait(JOIN_SECONDS)
    assert a.round.number == 1 and a.last("end") == b.last("end") == 3
    assert "ValueError: mine" in job.membership.over[1]
    assert "worker 0 failed first: ValueError: mine; 0 restarts left." in job.log


@pytest.mark.parametrize("victim", [True, False])
def test_secondary_failures_before_a_node_is_found_lost_cost_no_restart(victim):
    job = Job(max_restarts=0)
    a, b, c = job.started("a", "b", "c")
    b.ended(1, "worker 1 failed first: UnavailableError: gone", victim=True)
    c.ended(1, "worker 2 failed first: x", victim=victim)
    a.lost()
    b.ready(), c.ready()
    job.wait(JOIN_SECONDS)
    assert b.round.number == (1 if victim else 0)
    assert bool(job.membership.over) is not victim


def test_secondary_failures_alone_are_a_failure():
    job = Job()
    a, b = job.started("a", "b")
    for peer in (a, b):
        peer.ended(1, "worker 0 failed first: AbortedError", victim=True)
    assert a.last("end") == 1


def test_new_node_waits_for_a_checkpoint():
    job = Job()
    a, b = job.started("a", "b")
    c = Peer(job, "c").ready()
    job.wait()
    assert not a.last("regroup") and "next checkpoint" in job.membership.status(c.node)
    job.wait(JOIN_SECONDS)
    requests = [next(got for got in peer.got if "regroup" in got) for peer in (a, b)]
    assert [got["asks"] for got in requests] == [True, False]
    a.say("obstacle", why="no handler")
    assert "no handler" in job.membership.status(c.node)
    b.ended(stopping.EXIT_CODE)
    assert a.got[-1]["stop"] == 0 and a.got[-1]["saves"]
    a.ended(stopping.EXIT_CODE)
    a.ready(), b.ready()
    job.wait()
    assert [peer.rank for peer in (a, b, c)] == [0, 1, 2]


def test_node_that_reconnects_is_asked_for_the_checkpoint_again():
    job = Job()
    a, _ = job.started("a", "b")
    Peer(job, "c").ready()
    job.wait(JOIN_SECONDS)
    returning = Peer(job, "a", a.round)  # before the old connection is found lost
    a.lost()
    assert returning.got == [{"regroup": 0, "asks": True}]
    assert Peer(job, "b", a.round).got == [{"regroup": 0, "asks": False}]


def test_node_beyond_the_maximum_is_a_spare():
    job = Job()
    a, b, _ = job.started("a", "b", "c")
    d = Peer(job, "d").ready()
    job.wait(2 * JOIN_SECONDS)
    assert d.round is None and not a.last("regroup")
    assert "maximum" in job.membership.status(d.node)
    b.lost()
    for peer in job.peers[:1] + job.peers[2:3]:
        peer.ended(137, failed=False)
        peer.ready()
    job.wait()
    assert d.rank == 2 and a.rank == 0


def test_node_that_leaves_with_a_checkpoint_is_excluded():
    job = Job()
    a, b, c = job.started("a", "b", "c")
    c.say("leaves")
    assert job.log[-1] == f"node {c.node.name} leaves."
    for peer in (a, b, c):
        peer.ended(stopping.EXIT_CODE)
    c.lost()
    a.ready(), b.ready()
    job.wait(JOIN_SECONDS)
    assert (a.rank, b.rank, len(a.round.nodes)) == (0, 1, 2)


def test_stop_of_all_workers_ends_the_job():
    job = Job()
    a, b = job.started("a", "b")
    for peer in (a, b):
        peer.ended(stopping.EXIT_CODE)
    assert a.last("end") == b.last("end") == stopping.EXIT_CODE


def test_job_succeeds_when_all_workers_have_finished():
    job = Job()
    a, b = job.started("a", "b")
    c = Peer(job, "c").ready()
    a.ended(0)
    job.wait(JOIN_SECONDS)
    assert not b.last("regroup") and a.last("end") is None
    b.ended(0)
    assert [peer.last("end") for peer in (a, b, c)] == [0, 0, 0]
    assert Peer(job, "d").last("end") == 0


def test_too_few_nodes_end_the_job():
    job = Job(minimum=3)
    a = Peer(job, "a").ready()
    job.wait(TIMEOUT - 1)
    assert job.membership.over is None
    job.wait(1)
    assert a.last("end") == NO_ROUND_EXIT_CODE
    assert "1 of at least 3 nodes" in a.last("text") and "2 more" in a.last("text")


def test_too_few_nodes_after_a_loss_time_out_and_name_the_lost_nodes():
    job = Job()
    a, b = job.started("a", "b")
    job.wait(5 * TIMEOUT)  # of training
    b.lost()
    a.ended(137, failed=False)
    a.ready()
    job.wait(TIMEOUT - 1)
    assert b.node.name in job.membership.status(a.node)
    job.wait(1)
    assert a.last("end") == NO_ROUND_EXIT_CODE


def test_node_that_does_not_become_ready_is_excluded():
    job = Job()
    a, b, c = job.started("a", "b", "c")
    a.ended(7, "worker 0 failed first: ValueError", failed=False)
    for peer in (b, c):
        peer.ended(0)
    b.ready(), c.ready()
    job.wait(TIMEOUT - 1)
    assert b.round.number == 0
    job.wait(1)
    assert (b.rank, c.rank, b.round.number) == (0, 1, 1) and a.round.number == 0


def test_new_rendezvous_takes_over_a_running_round():
    old = Job(max_restarts=1)
    a, b = old.started("a", "b")
    claimed = dataclasses.replace(a.round, number=4, failures=1)
    new = Job(max_restarts=1)
    a, b = Peer(new, "a", claimed), Peer(new, "b", claimed)
    new.wait(2 * LOST_SECONDS)
    assert not a.got and not b.got
    b.ended(7, "worker 1 failed first: ValueError", number=4)
    assert a.last("stop") == 4
    a.ended(137, failed=False, number=4)
    assert a.last("end") == 7  # the earlier failure counts


def test_new_rendezvous_continues_the_counters_of_waiting_nodes():
    job = Job(max_restarts=1)
    a, b = Peer(job, "a").ready(), Peer(job, "b", rounds=3, failures=1).ready()
    job.wait(JOIN_SECONDS)
    assert a.round.number == b.round.number == 3
    a.ended(7, "worker 0 failed first: ValueError")
    b.ended(137, failed=False)
    assert b.last("end") == 7


def test_round_ends_if_a_node_does_not_reconnect_to_a_new_rendezvous():
    old = Job()
    claimed = old.started("a", "b", "c")[0].round
    new = Job()
    a, b = Peer(new, "a", claimed), Peer(new, "b", claimed)
    new.wait(LOST_SECONDS)
    assert a.last("stop") == b.last("stop") == 0
    for peer in (a, b):
        peer.ended(137, failed=False, number=0)
        peer.ready()
    new.wait(JOIN_SECONDS)
    assert a.round.number == b.round.number == 1


def test_node_of_an_earlier_round_is_stopped_and_joins():
    job = Job()
    a, b, c = job.started("a", "b", "c")
    claimed = c.round
    c.lost()
    for peer in (a, b):
        peer.ended(137, failed=False)
        peer.ready()
    returning = Peer(job, "c", claimed)
    assert returning.last("stop") == 0
    job.wait(JOIN_SECONDS)
    assert a.round.number == 0  # waits for the end of those workers
    returning.ended(137, failed=False, number=0)
    returning.ready()
    job.wait()
    assert returning.round.number == 1 and returning.rank == 2


def test_mismatched_settings_and_malformed_messages_are_rejected():
    job = Job()
    a = Peer(job, "a").ready()
    with pytest.raises(Refused, match=r"2:3.*2:4"):
        Peer(job, "b", maximum=4)
    with pytest.raises(Refused, match="0.0.0"):
        Peer(job, "b", version="0.0.0")
    good = {**dataclasses.asdict(Settings(2, 3, 0)), "host": "h", "process": 1, "node": "x"}
    good |= {"rounds": 0, "failures": 0}
    assert job.membership.join(good, print, 0.0).name == "h (process 1)"
    for bad in (
        {"minimum": "2"},
        {"maximum": None},
        {"host": 5},
        {"node": None},
        {"process": "1"},
        {"rounds": None},
        {"failures": "1"},
        {"round": {"number": 0}},
        {"round": {"number": 0, "failures": 0, "nodes": [1], "addresses": [["h:1"]]}},
        {"round": {"number": 0, "failures": 0, "nodes": ["x"], "addresses": []}},
    ):
        with pytest.raises(Refused):
            job.membership.join({**good, **bad}, print, 0.0)
    for words in (
        {},
        {"kind": "crash"},
        {"kind": "ready", "ports": []},
        {"kind": "ready", "ports": ["1"]},
        {"kind": "ready", "ports": [70000]},
        {"kind": "ended", "round": 0},
        {"kind": ["ready"]},
    ):
        with pytest.raises(Refused):
            job.membership.receive(a.node, words, 0.0)


def test_nodes_on_one_host_get_different_ports():
    job = Job()
    a = Peer(job, "a").ready(20000)
    b = Peer(job, "b")
    b.node.host = a.node.host
    assert b.ready(20000).last("taken") and not b.node.ready
    assert b.ready(20001).node.ready == ("10.0.0.1:20001",)


def test_node_that_reconnects_early_continues():
    job = Job()
    a, b = job.started("a", "b")
    again = Peer(job, "a", a.round)
    a.lost()  # the old connection
    assert not b.last("stop") and not again.last("stop")


def test_workers_of_a_node_have_adjacent_ranks():
    both = Round(0, ("a", "b"), (("h:1", "h:2"), ("i:1",)), 0)
    assert [*both.ranks("a"), *both.ranks("b")] == [0, 1, 2]
    assert both.workers == ("h:1", "h:2", "i:1")
    assert Round.of(dataclasses.asdict(both)) == both
