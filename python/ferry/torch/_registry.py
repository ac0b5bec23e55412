"""Exchanges by number: operators take tensors and numbers only."""

from __future__ import annotations

import itertools
import weakref

import ferry

_numbers = itertools.count(1)
_exchanges: weakref.WeakValueDictionary[int, ferry.Exchange] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[ferry.Exchange, int] = weakref.WeakKeyDictionary()


def handle_of(exchange: ferry.Exchange) -> int:
    """The number by which operators know an exchange, as long as it lives. Each rank has its own."""
    if not isinstance(exchange, ferry.Exchange):
        raise ferry.UsageError(f"exchange: expected an Exchange or its handle, got {type(exchange).__name__}")
    handle = _handles.get(exchange)
    if handle is None:
        handle = next(_numbers)
        _handles[exchange] = handle
        _exchanges[handle] = exchange
    return handle


def exchange_of(handle: int) -> ferry.Exchange:
    exchange = _exchanges.get(handle)
    if exchange is None:
        raise ferry.UsageError(f"no exchange has the handle {handle}: it is gone, or was never registered")
    return exchange
