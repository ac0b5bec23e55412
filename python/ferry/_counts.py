"""Counters of an exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy


class LoadCounts(NamedTuple):
    """Routes of all dispatches of an exchange so far, over all lanes and ranks; the same on every rank."""

    experts: numpy.ndarray
    """int64 [E]: routes to each expert."""
    layers: numpy.ndarray
    """int64 [Config.layers, E]: the same, by the `layer` of the dispatches."""
    ranks: numpy.ndarray
    """int64 [R]: routes to each rank."""
    dispatches: int
    """Number of dispatches counted; a dispatch by a plan is not."""


class WireCounts(NamedTuple):
    """Bytes and messages that a rank has sent to other ranks, flags not counted; those that it has forwarded as a relay
    are. The fields `..._between_nodes` are the part that went to other nodes, 0 with 'cuda'."""

    dispatch_bytes: int
    dispatch_messages: int
    combine_bytes: int
    combine_messages: int
    dispatch_bytes_between_nodes: int
    dispatch_messages_between_nodes: int
    combine_bytes_between_nodes: int
    combine_messages_between_nodes: int


class WaitTimes(NamedTuple):
    """Nanoseconds that a rank has waited for each peer so far, over all lanes; all 0 without `count_waits`. The own entry
    has the waits in which nobody could tell who was missing."""

    dispatch: numpy.ndarray
    """int64 [R]: in dispatches, and in all other calls that `combine` lacks."""
    combine: numpy.ndarray
    """int64 [R]: in combine, return_values and reduce_scatter_v."""
