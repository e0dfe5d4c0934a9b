"""Isolation of the workers' ports, because TensorFlow's server listens on all interfaces.

A process that connects to such a port can run operations in the worker without authentication. Two
ways to close the ports if all workers run on this machine:

* `loopback_only()`: a library that is preloaded into the workers binds the ports of TF_CONFIG to
  127.0.0.1. Other users of this machine can still connect.
* `enter_namespace()`: the workers run in a network namespace with only a loopback interface. No
  connections from or to the outside are possible, so a script cannot download data.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from tf_redsync.building import BuildError, libraries

CHOICES = ("auto", "yes", "no")
LIBRARY = Path(__file__).with_name("_loopback_only.so")  # built in place, in a source tree
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sH14x")  # struct ifreq: name, flags


def isolate(choice: str, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Isolate the workers that this process will start; return variables for them.

    Args:
        choice: "yes" enters a network namespace with this process. "auto" binds ports to the
            loopback address if possible, and otherwise prints a warning. "no" does nothing.
        env: The workers' environment, whose LD_PRELOAD is extended.

    Returns:
        Variables for the workers' environment.

    Raises:
        ValueError: `choice` is "yes", and this process may not create a network namespace.
    """
    if choice == "yes":
        enter_namespace()
        return {}
    if choice == "no":
        return {}
    variables, lack = loopback_only(env)
    if lack and (interfaces := reachable_through()):
        print(
            "tf_redsync.launch: warning: other machines can connect to the workers' ports through "
            f"{', '.join(interfaces)} and run operations in the workers. There is no library that "
            f"closes the ports: {lack} Or pass --isolate yes to close them, or --isolate no to "
            "silence this warning (the argument `isolate` of `run`). See docs/security.md.",
            file=sys.stderr,
        )
    return variables


def loopback_only(env: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str]:
    """Return variables that bind workers to the loopback interface, and why there are none."""
    library = LIBRARY
    if not library.is_file() or not _can_be_preloaded(library) or libraries.is_foreign(library):
        try:
            library = libraries.loopback_only()
        except BuildError as error:
            return {}, f"{error}."
        if not _can_be_preloaded(library):
            remedy = "Set TF_REDSYNC_CACHE to another folder."
            return {}, f"its path {library} has a space or a colon. {remedy}"
    others = env.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{others}" if others else str(library)}, ""


def _can_be_preloaded(library: Path) -> bool:
    """Return whether a path has none of the characters that separate paths in LD_PRELOAD."""
    return not set(" :").intersection(str(library))


def reachable_through() -> list[str]:
    """Return the names of the interfaces that are up, without loopback."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return []
    return [name for name in names if _flags(name) & _IFF_UP and not name.startswith("lo")]


def enter_namespace() -> None:
    """Move this process into a network namespace with only a loopback interface.

    Raises:
        ValueError: the process may not create a namespace. Its state is then unchanged.
    """
    # A partial failure would leave this process without a network, so a child tries first.
    problem = _problem_of_a_child() or _problem_on_entry()  # the child has no further threads
    if problem:
        raise ValueError(
            f"this process may not create a network namespace ({problem}). Received: isolate='yes'."
            " Use --isolate auto, or run the launcher as root, or allow user namespaces "
            "(kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
            "in a container: --cap-add SYS_ADMIN). A process with several threads needs root. See "
            "docs/security.md."
        )


def _problem_of_a_child() -> str:
    """Return a child process's error on entering a namespace; empty if it succeeded."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "the trial process was killed"
        try:
            text = _problem_on_entry()
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return text or (f"the trial process ended with status {status}" if status else "")


def _problem_on_entry() -> str:
    """Enter a namespace; return the error, empty on success."""
    try:
        _enter()
    except OSError as error:
        return str(error)
    return ""


def _enter() -> None:
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_CLONE_NEWNET)  # root needs no user namespace
    except PermissionError:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        process = Path("/proc/self")
        with contextlib.suppress(FileNotFoundError):  # before Linux 3.19
            (process / "setgroups").write_text("deny")
        (process / "uid_map").write_text(f"{user} {user} 1")
        (process / "gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = _INTERFACE.pack(b"lo", _flags("lo") | _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")


def _flags(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = _INTERFACE.pack(interface.encode(), 0)
        return int(_INTERFACE.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1])
