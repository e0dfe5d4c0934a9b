"""A network of worker machines with a limited rate, inside one Linux machine.

    with network(workers=2, rate="1gbit") as lab:
        launch.run(command, 2, addresses=lab.addresses, wrappers=lab.wrappers)

Every worker has a network namespace with one interface, `eth0`. Its peer is a port of a bridge in
another namespace, the switch. Token bucket filters limit the rate in both directions (on `eth0` and
on the switch's port), as on a switched full-duplex link. No packet leaves the namespaces, and no
interface appears outside of them.

With a latency the interfaces are tap devices. A separate process forwards their frames after the
delay (`benchmarks/relay.py`), at the same rates. Packets then have 9,000 bytes to limit the
processor time.

A guard process removes the namespaces when this process closes a pipe: at the end of the block,
after an exception, or when this process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tf_redsync import launch
from tf_redsync.cli import plan

INTERFACE = "eth0"
PORT = 20000
_SUBNET = "10.213.7"
_BURST, _LATENCY = "256kb", "50ms"
BURST_BYTES = 256 * 1024  # bytes that pass at full speed after a pause: tc's kb are 1024 bytes
_RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[kmg]bit")
_NETNS = "/run/netns"
_MTU = 9000  # bytes per packet, with a latency
# The sleep lets a pending creation finish if the owner was killed during it.
_GUARD = 'cat; sleep 0.2; for name in "$@"; do ip netns del "$name" 2>/dev/null; done; exit 0'


class NetworkError(RuntimeError):
    """The network cannot be built here; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Lab:
    """A network of workers.

    Attributes:
      rate: "none" or the rate of each direction of each link, in tc's format.
      latency: added round-trip time in milliseconds.
      addresses: "host:port" per worker, for TF_CONFIG.
      wrappers: per worker, the command prefix that runs a command on its machine.
      interface: name of the interface inside each namespace; None on loopback.
    """

    rate: str
    addresses: tuple[str, ...]
    wrappers: tuple[tuple[str, ...], ...]
    interface: str | None
    latency: float = 0.0


def parse_rate(rate: str) -> str:
    """Returns `rate` if it is "none" or a number with kbit, mbit or gbit; ValueError otherwise."""
    if rate != "none" and not _RATE.fullmatch(rate):
        raise ValueError(f"`rate` must be none, or like 100mbit or 1gbit. Received: rate={rate!r}.")
    return rate


@contextlib.contextmanager
def network(workers: int, rate: str, latency: float = 0.0) -> Iterator[Lab]:
    """Builds the network for a `with` block.

    Args:
      workers: number of machines, 1 to 250.
      rate: "none" for the plain loopback interface (no namespaces, no byte counters), or the rate
        of each direction of each link, for example "1gbit".
      latency: round-trip time in milliseconds; it needs a rate.

    Yields:
      A `Lab`.

    Raises:
      ValueError: an argument is out of range.
      NetworkError: not root, `ip` or `tc` is missing, names are taken, or a command failed.
    """
    if not 1 <= workers <= 250:
        raise ValueError(f"`workers` must be 1 to 250. Received: workers={workers}.")
    if latency < 0 or (latency and parse_rate(rate) == "none"):
        raise ValueError(
            "`latency` must be at least 0, and needs a `rate`. Received: "
            f"latency={latency}, rate={rate!r}."
        )
    if parse_rate(rate) == "none":
        ports = launch.free_ports(workers)
        yield Lab("none", tuple(f"127.0.0.1:{p}" for p in ports), ((),) * workers, None)
        return
    _check_host()
    switch, machines = _names(workers)
    names = [switch, *machines]
    _refuse_leftovers(names)
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # otherwise Ctrl-C would end the guard
    )
    relay = None
    try:
        if latency:
            relay = _relay(machines, rate, latency)
            _configure(machines, rate)
        else:
            _build(switch, machines, rate)
        addresses = tuple(f"{_address(i)}:{PORT}" for i in range(workers))
        wrappers = tuple(("ip", "netns", "exec", name) for name in machines)
        yield Lab(rate, addresses, wrappers, INTERFACE, latency)
    finally:
        ended = "" if relay is None else _end(relay)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
        _report_leftovers(names)
        if ended:
            raise NetworkError(f"The relay of packets ended before its network: {ended}")


def wire_bytes(interface: str, namespace: str | None = None) -> int:
    """Returns the bytes that an interface has sent, from `ip -s -j link`.

    Args:
      interface: its name.
      namespace: its namespace; None for that of this process, such as a worker of the lab.

    The counter includes Ethernet, IP and TCP headers. Segments that the kernel hands over together
    count one header.
    """
    where = ["-n", namespace] if namespace else []
    output = _run("ip", *where, "-s", "-j", "link", "show", "dev", interface)
    return json.loads(output)[0]["stats64"]["tx"]["bytes"]


def set_rate(workers: int, rate: str, pid: int | None = None) -> None:
    """Changes the rate of every link of a running network without a latency.

    Args:
      workers: number of machines of the network.
      rate: as for `network`, but not "none".
      pid: the process that made the network, by default this one. Workers, which have root rights
        from `network`, may name their driver.

    Raises:
      ValueError: `rate` is invalid.
      NetworkError: there is no such network.
    """
    if parse_rate(rate) == "none":
        raise ValueError("`rate` must be like 100mbit or 1gbit. Received: rate='none'.")
    switch, machines = _names(workers, pid)
    for i, machine in enumerate(machines):
        for where, name in ((machine, INTERFACE), (switch, f"port{i}")):
            _run("tc", "-n", where, "qdisc", "replace", "dev", name, "root", *_shape(rate))


def namespaces_of(pid: int) -> list[str]:
    """Returns the names of the existing namespaces made by process `pid`."""
    found = os.listdir(_NETNS) if os.path.isdir(_NETNS) else []
    return sorted(name for name in found if name.startswith(f"redsync-{pid}-"))


def _names(workers: int, pid: int | None = None) -> tuple[str, list[str]]:
    prefix = f"redsync-{pid or os.getpid()}"
    return f"{prefix}-switch", [f"{prefix}-worker{i}" for i in range(workers)]


def _address(index: int) -> str:
    return f"{_SUBNET}.{index + 1}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _check_host() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    reason = ""
    if os.geteuid() != 0:
        reason = "root is needed to make network namespaces"
    elif missing:
        reason = f"not installed: {' and '.join(missing)} (Debian package iproute2)"
    if reason:
        raise NetworkError(
            f"No network with a rate limit can be built: {reason}. Use `--rate none` to run on the "
            "loopback interface as it is, without a limit and without byte counters."
        )


def _refuse_leftovers(names: Sequence[str]) -> None:
    taken = [name for name in names if os.path.exists(f"{_NETNS}/{name}")]
    if taken:
        remedy = "; ".join(f"ip netns del {name}" for name in taken)
        raise NetworkError(
            f"Network namespaces of an earlier run exist: {', '.join(taken)}. If nothing uses "
            f"them, remove them: {remedy}."
        )


def _report_leftovers(names: Sequence[str]) -> None:
    left = [name for name in names if os.path.exists(f"{_NETNS}/{name}")]
    if left:
        raise NetworkError(f"Network namespaces could not be removed: {', '.join(left)}.")


def _build(switch: str, machines: Sequence[str], rate: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for i, machine in enumerate(machines):
        _run("ip", "netns", "add", machine)
        port = f"port{i}"
        peer = ("peer", "name", INTERFACE, "netns", machine)
        _run("ip", "-n", switch, "link", "add", "name", port, "type", "veth", *peer)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", machine, "address", "add", f"{_address(i)}/24", "dev", INTERFACE)
        # No IPv6 address: its announcements would count as traffic of the training.
        for where, name in ((machine, INTERFACE), (switch, port)):
            _run("ip", "-n", where, "link", "set", name, "addrgenmode", "none")
        _run("ip", "-n", machine, "link", "set", "lo", "up")
        _run("ip", "-n", machine, "link", "set", INTERFACE, "up")
        for where, name in ((machine, INTERFACE), (switch, port)):
            _run("tc", "-n", where, "qdisc", "add", "dev", name, "root", *_shape(rate))


def _relay(machines: Sequence[str], rate: str, latency: float) -> subprocess.Popen:
    """Creates the machines; returns the relay process, which holds their interfaces."""
    for machine in machines:
        _run("ip", "netns", "add", machine)
    flags = ["--delay", str(latency / 2e3), "--rate", str(plan.bytes_per_second(rate))]
    relay = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("relay.py")), *flags, *machines],
        stdin=subprocess.PIPE,  # the namespaces end with this process and the relay
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert relay.stdout is not None and relay.stderr is not None
    if relay.stdout.readline().strip() != "ready":
        relay.kill()
        raise NetworkError(f"The relay of packets did not start: {relay.stderr.read().strip()}")
    return relay


def _configure(machines: Sequence[str], rate: str) -> None:
    for i, machine in enumerate(machines):
        _run("ip", "-n", machine, "address", "add", f"{_address(i)}/24", "dev", INTERFACE)
        _run("ip", "-n", machine, "link", "set", INTERFACE, "addrgenmode", "none", "mtu", str(_MTU))
        _run("ip", "-n", machine, "link", "set", "lo", "up")
        _run("ip", "-n", machine, "link", "set", INTERFACE, "up")
        _run("tc", "-n", machine, "qdisc", "add", "dev", INTERFACE, "root", *_shape(rate))


def _end(relay: subprocess.Popen) -> str:
    """Ends a relay; returns its output if it had failed before."""
    alive = relay.poll() is None
    relay.kill()
    _, said = relay.communicate()
    return "" if alive else said.strip() or f"exit code {relay.returncode}"


def _shape(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
