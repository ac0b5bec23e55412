"""Numbers for exchanges, because registered operators take only tensors and numbers."""

from __future__ import annotations

import itertools
import uuid
import weakref

import ferry

_PROCESS = uuid.uuid4().hex  # differs between processes; a child by fork has its parent's exchanges and may not use them
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


def key_of(exchange: ferry.Exchange | None) -> tuple[str, int]:
    """What a pickled object holds in the place of its exchange."""
    return _PROCESS, 0 if exchange is None else handle_of(exchange)


def exchange_with(key: tuple[str, int]) -> ferry.Exchange | None:
    """The exchange of a key; None in another process, and if it was deleted."""
    process, handle = key
    return _exchanges.get(handle) if process == _PROCESS else None


def exchange_of(handle: int) -> ferry.Exchange:
    exchange = _exchanges.get(handle)
    if exchange is None:
        raise ferry.UsageError(f"no exchange has the handle {handle}: it was deleted, or never registered")
    return exchange
