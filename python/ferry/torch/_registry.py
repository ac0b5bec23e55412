"""Numbers for exchanges, because registered operators take only tensors and numbers."""

from __future__ import annotations

import itertools
import weakref

import ferry

_numbers = itertools.count(1)
_exchanges: weakref.WeakValueDictionary[int, ferry.Exchange] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[ferry.Exchange, int] = weakref.WeakKeyDictionary()


def handle_of(exchange: ferry.Exchange) -> int:
    """The number that operators take for an exchange, valid while the exchange lives. It differs between ranks."""
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
        raise ferry.UsageError(f"no exchange has the handle {handle}: it was deleted, or never registered")
    return exchange
