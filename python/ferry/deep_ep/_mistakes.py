"""Arguments that do not fit: found before they are used, and told to the ranks that would wait."""

from __future__ import annotations

import contextlib
import operator

import ferry

MOST = 2**31 - 1  # of numbers that the core takes


def require(arrays, array, name, dimensions, *types):
    """Raises UsageError unless `array` is one of the call's kind, and of one of `types` if there are any."""
    if not arrays.has(array):
        raise ferry.UsageError(f"{name}: expected an array of the kind and place of x, got {type(array).__name__}")
    if array.ndim != dimensions:
        raise ferry.UsageError(f"{name}: expected {dimensions} dimensions, got shape {list(array.shape)}")
    if types and array.dtype not in arrays.dtypes(types):
        raise ferry.UsageError(f"{name}: expected {' or '.join(types)}, got {arrays.type_name(array)}")


def require_shape(array, name, expected):
    if array.shape != expected:
        raise ferry.UsageError(f"{name}: expected shape {list(expected)}, got {list(array.shape)}")


def require_whole(number, name, least):
    """Raises UsageError unless `number` is whole, `least` or more."""
    try:
        found = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = None
    if found is None or not least <= found <= MOST:
        raise ferry.UsageError(f"{name}: expected a whole number of {least} to {MOST}, got {number!r}")


class told_to_peers:
    """What the block raises ends the peers' call too: `refuse` makes the call with arguments the core refuses."""

    def __init__(self, refuse):
        self.refuse = refuse

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception):
            with contextlib.suppress(ferry.Error):
                self.refuse()


def refuse_dispatch(exchange, arrays, like):
    # With tokens the refusal goes to their stream, behind the calls before it; ids are what is missing.
    tokens = arrays.empty((0, exchange.config.hidden), "bfloat16", like) if arrays.has(like) else None
    exchange.dispatch(tokens, None)


def refuse_combine(exchange, plan):
    exchange.combine(None, plan)
