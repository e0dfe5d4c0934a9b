"""Counts the instructions of this process if the machine supports and permits it."""

from __future__ import annotations

import ctypes
import os
import platform

_HARDWARE, _INSTRUCTIONS = 0, 1  # perf_event_attr.type and .config
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6  # bits of .flags
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}


class _Attributes(ctypes.Structure):
    """The first 112 bytes of Linux's perf_event_attr."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 8),
    ]


class Instructions:
    """User-mode instructions of this process and of all threads started afterwards.

    Attributes:
      problem: Why there is no count; None if there is one.
    """

    def __init__(self):
        self._file = -1
        self.problem: str | None = None
        number = _PERF_EVENT_OPEN.get(platform.machine())
        if number is None or not hasattr(os, "sched_getaffinity"):
            self.problem = f"not known how to ask on {platform.system()} {platform.machine()}"
            return
        flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        attributes = _Attributes(
            type=_HARDWARE, size=ctypes.sizeof(_Attributes), config=_INSTRUCTIONS, flags=flags
        )
        system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._file = system_call(number, ctypes.byref(attributes), 0, -1, -1, 0)
        if self._file < 0:
            self.problem = f"perf_event_open: {os.strerror(ctypes.get_errno())}"

    def read(self) -> int | None:
        """Instructions so far, or None."""
        if self._file < 0:
            return None
        return int.from_bytes(os.read(self._file, 8), "little")
