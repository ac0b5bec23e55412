"""Counts that an exchange keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy


class LoadCounts(NamedTuple):
    """Tokens seen so far by an exchange, all lanes, on every rank alike."""

    experts: numpy.ndarray
    """int64 [E]: routes to every expert."""
    ranks: numpy.ndarray
    """int64 [R]: routes to every rank."""
    dispatches: int


class WireCounts(NamedTuple):
    """Bytes a rank has written to other ranks' memory, and the messages they were in."""

    dispatch_bytes: int
    dispatch_messages: int
    combine_bytes: int
    combine_messages: int
