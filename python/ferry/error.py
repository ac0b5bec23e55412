"""What goes wrong, as exceptions: the hierarchy of the C++ library, each message with the numbers that matter.

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
    """An expert id outside [-1, experts): the lowest (token, slot) of the call, and how many there were."""

    rank: int
    token: int
    slot: int
    id: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which a record has no use for


class BadSource(NamedTuple):
    """Entries of a plan that point outside the exchange: the lowest index, and how many there were."""

    rank: int
    index: int  # type: ignore[assignment]
    count: int  # type: ignore[assignment]  # hides tuple.count, which a record has no use for


class Overflow(NamedTuple):
    """The rank that needs most rows, the rows it has and would have needed, and routes dropped on all ranks."""

    rank: int
    capacity: int
    needed: int
    dropped: int


class WaitRecord(NamedTuple):
    """Who waited for whom: operation, call number of the lane, the waiting rank, the missing one, flag values."""

    operation: str
    call: int
    rank: int
    peer: int
    expected: int
    seen: int


class Error(Exception):
    """Any error of Ferry."""


class _WithRecord(Error):
    def __init__(self, message: str, record: Any = None):
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), (str(self), self.record)


class UsageError(Error, ValueError):
    """The caller's arguments or data are wrong. The exchange stays usable."""


class BadIdError(_WithRecord, UsageError):
    """Expert ids out of range (`record`: BadId). Their slots were skipped, everything else was carried."""

    record: BadId


class BadSourceError(_WithRecord, UsageError):
    """A plan's entries point outside the exchange (`record`: BadSource). They were skipped."""

    record: BadSource


class OverflowError(_WithRecord, builtins.OverflowError):
    """Routes past the capacity were dropped in row order (`record`: Overflow, the same on every rank)."""

    record: Overflow


class TimeoutError(_WithRecord, builtins.TimeoutError):
    """A peer did not come before the deadline (`record`: WaitRecord). Final for the group."""

    record: WaitRecord


class PeerLostError(_WithRecord):
    """A peer died or left with an error (`record`: WaitRecord). Final for the group."""

    record: WaitRecord


class SystemError(Error):
    """The operating system refused something (`error_number`: errno)."""

    def __init__(self, message: str, error_number: int = 0):
        super().__init__(message)
        self.error_number = error_number

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), (str(self), self.error_number)


class UnsupportedError(Error):
    """This build, backend or machine cannot do it."""
