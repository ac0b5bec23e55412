"""The exceptions of Ferry: the C++ library's hierarchy, with the numbers of each error in `record`.

UsageError and OverflowError leave an exchange usable; TimeoutError and PeerLostError are final for the group.
"""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

__all__ = [
    "BadId",
    "BadIdError",
    "BadSource",
    "BadSourceError",
    "Error",
    "Overflow",
    "OverflowError",
    "PeerLostError",
    "SystemError",
    "TimeoutError",
    "UnsupportedError",
    "UsageError",
    "WaitRecord",
]


class BadId(NamedTuple):
    """The first expert id outside [-1, experts) by (token, slot), and `count`, the number of such ids in the call."""

    rank: int
    token: int
    slot: int
    id: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class BadSource(NamedTuple):
    """The first entry of a plan that points outside the exchange, and `count`, the number of such entries."""

    rank: int
    index: int  # type: ignore[assignment]
    count: int  # type: ignore[assignment]  # hides tuple.count


class Overflow(NamedTuple):
    """The rank that needs the most rows, its capacity, the rows needed there, and routes dropped on all ranks."""

    rank: int
    capacity: int
    needed: int
    dropped: int


class WaitRecord(NamedTuple):
    """A wait that failed: `rank` waited for `peer` in `operation`, call number `call` of its lane, for a flag to become
    `expected`; the value last read is `observed`. `via`: the relay that forwards what it waited for; -1: none.
    `role`: what `rank` did in two hops: "sender", "relay", "receiver"; "none": one hop, a wait for call headers, or not known.
    `node`: of `peer`, or without one of `via`; -1: not known, or the group has one node."""

    operation: str
    call: int
    rank: int
    peer: int
    expected: int
    observed: int
    via: int = -1
    role: str = "none"
    node: int = -1


class Error(Exception):
    """Base class of all errors of Ferry."""


class _WithRecord(Error):
    def __init__(self, message: str, record: Any = None):
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), (str(self), self.record)


class UsageError(Error, ValueError):
    """The caller's arguments or data are wrong. The exchange stays usable."""


class BadIdError(_WithRecord, UsageError):
    """Expert ids are out of range (`record`: BadId). Their slots were skipped; all other rows were sent."""

    record: BadId


class BadSourceError(_WithRecord, UsageError):
    """A plan's entries point outside the exchange (`record`: BadSource). They were skipped."""

    record: BadSource


class OverflowError(_WithRecord, builtins.OverflowError):
    """Rows past the capacity were dropped (`record`: Overflow, the same on every rank). The rows that fit were delivered."""

    record: Overflow


class TimeoutError(_WithRecord, builtins.TimeoutError):
    """A peer did not take part before the deadline (`record`: WaitRecord). Final for the group."""

    record: WaitRecord


class PeerLostError(_WithRecord):
    """A peer died or left with an error (`record`: WaitRecord). Final for the group."""

    record: WaitRecord


class SystemError(Error):
    """An operating system call failed (`error_number`: errno)."""

    def __init__(self, message: str, error_number: int = 0):
        super().__init__(message)
        self.error_number = error_number

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), (str(self), self.error_number)


class UnsupportedError(Error):
    """This build, backend or machine does not support the request."""
