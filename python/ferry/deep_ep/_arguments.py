"""Reads the arguments of the interfaces whose calls are written in Python."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import ferry
from ferry.deep_ep._arrays import arrays_of


def integer(name: str, value: Any, least: int = 0) -> int:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if least <= number < 2**31:
                return number
    raise ferry.UsageError(f"{name}: expected an integer from {least} to 2147483647, got {value!r}")


def read_array(name: str, array: Any, arrays: Any, types: tuple[str, ...], shape: tuple[int | None, ...], first: str = "x") -> Any:
    """The array, C-contiguous, after checks. `shape`: with None where any length will do; `types`: names.

    `first`: the argument whose framework and kind of device `arrays` is of.
    """
    if arrays_of(array) is not arrays or not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise ferry.UsageError(f"{name}: expected an array of the framework and device of {first}, got {type(array).__name__}")
    kind, found = arrays.type_name(array), tuple(array.shape)
    fits = len(found) == len(shape) and all(length in (None, there) for length, there in zip(shape, found))
    if kind not in types or not fits:
        wanted = f"[{', '.join('any' if length is None else str(length) for length in shape)}]"
        raise ferry.UsageError(f"{name}: expected {' or '.join(types)} of shape {wanted}, got {kind} of shape {list(found)}")
    return arrays.contiguous(array)
