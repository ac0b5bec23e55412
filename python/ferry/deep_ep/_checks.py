"""Checks of arguments, and how a failed check ends the call on the ranks that would otherwise wait."""

from __future__ import annotations

import contextlib
import operator

import ferry

INT32_MAX = 2**31 - 1  # the core takes 32-bit numbers


def require(arrays, array, name, dimensions, *types):
    """Raises UsageError unless `array` has the call's framework and device, and one of `types` if any are given."""
    if not arrays.accepts(array):
        raise ferry.UsageError(f"{name}: expected an array of the framework and device of x, got {type(array).__name__}")
    if array.ndim != dimensions:
        raise ferry.UsageError(f"{name}: expected {dimensions} dimensions, got shape {list(array.shape)}")
    if types and array.dtype not in arrays.dtypes(types):
        raise ferry.UsageError(f"{name}: expected {' or '.join(types)}, got {arrays.type_name(array)}")


def require_shape(array, name, expected):
    if array.shape != expected:
        raise ferry.UsageError(f"{name}: expected shape {list(expected)}, got {list(array.shape)}")


def require_integer(number, name, least):
    """Raises UsageError unless `number` is an integer of `least` or more that fits 32 bits."""
    try:
        found = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = None
    if found is None or not least <= found <= INT32_MAX:
        raise ferry.UsageError(f"{name}: expected an integer from {least} to {INT32_MAX}, got {number!r}")


class refusing:
    """If the block raises, the peers' next call on the exchange ends with the same error."""

    def __init__(self, exchange):
        self.exchange = exchange

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception):
            with contextlib.suppress(ferry.Error):
                self.exchange.refuse(str(error))
