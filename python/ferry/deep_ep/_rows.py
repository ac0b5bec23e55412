"""The rows that a dispatch sends, and those that it receives."""

from __future__ import annotations

from typing import Any

import ferry
from ferry.deep_ep import _normal


class Rows:
    """Tokens as an exchange takes them: bfloat16, or values of a byte and scales, padded to multiples of 16 bytes a row."""

    def __init__(self, arrays: Any, values: Any, scales: Any = None):
        """`values`: [T, H]; `scales`: [T, n] of four bytes each."""
        self.arrays = arrays
        self.tokens, self.hidden = values.shape
        self.parts: tuple[Any, ...] = (values,)
        self.format, self.scales = "bf16", 0
        if scales is not None:
            self.scales = scales.shape[1]
            padded = -(-self.scales // 4) * 4
            if padded != self.scales:
                scales = _normal.padded_columns(scales, padded)
            self.parts, self.format = (values, scales), f"raw:{self.hidden}+{4 * padded}"

    def sent(self) -> Any:
        return self.parts if self.scales else self.parts[0]

    def room(self, rows: int) -> tuple[Any, ...]:
        """New arrays for as many received rows."""
        return tuple(self.arrays.empty((rows, part.shape[1]), self.arrays.type_name(part), part) for part in self.parts)

    def received(self, parts: tuple[Any, ...], rows: int, column_major: bool = False) -> Any:
        """The values from arrays of room(), or (values, scales)."""
        values = parts[0][:rows]
        if not self.scales:
            return values
        scales = parts[1][:rows, : self.scales]
        if column_major:
            columns = self.arrays.empty((self.scales, -(-rows // 4) * 4), self.arrays.type_name(scales), scales)
            columns[:, :rows] = scales.T
            return values, columns[:, :rows].T
        return values, self.arrays.contiguous(scales)


class Received:
    """New memory for the rows of a dispatch: its parts, weights and, if rows are not permuted, ids."""

    def __init__(self, exchange: ferry.Exchange, rows: Rows, count: int, weighted: bool):
        self.rows = count
        self._capacity = exchange.capacity
        room, plain, slots = max(1, count), exchange.config.layout == "rank_major", exchange.config.top_k
        arrays, like = rows.arrays, rows.parts[0]
        self.parts = rows.room(room)
        self.plan = arrays.empty((exchange.plan_bytes,), "uint8", like)
        self.weights = arrays.empty((room, slots) if plain else (room,), "float32", like) if weighted else None
        self.ids: Any = arrays.full((room, slots), -1, "int32", like) if plain else None

    def memory(self, **more: Any) -> ferry.ReceiveBuffers:
        return ferry.ReceiveBuffers(self.parts, weight=self.weights, local_ids=self.ids, plan=self.plan,
                                    rows=min(max(1, self.rows), self._capacity), **more)

    def arrays(self) -> list[Any]:
        return [array for array in (*self.parts, self.plan, self.weights, self.ids) if array is not None]
