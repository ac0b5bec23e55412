"""Sessions of ElasticBuffer.all_gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ferry
from ferry._core import _CallScope
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._elastic_exchanges import ElasticExchanges
from ferry.deep_ep._elastic_sizes import GATHER_UNIT, rounded_up, shapes_of
from ferry.deep_ep._exchanges import ELASTIC_GATHER


class Sessions:
    """all_gather within sessions, which bound its bytes and its calls."""

    def __init__(self, streams: Any, exchanges: ElasticExchanges):
        self._streams, self._exchanges = streams, exchanges
        self._most_bytes = self._most_calls = 0
        self._open = False
        self._in_place: dict[tuple[int, int], Any] = {}  # (address, bytes) of this rank's part: the array of all ranks

    def set_config(self, most_bytes: int, most_calls: int) -> None:
        self._most_bytes, self._most_calls = rounded_up(most_bytes, GATHER_UNIT), most_calls

    def begin(self) -> None:
        if self._open:
            raise ferry.UsageError("create_agrs_session: a session is open: call destroy_agrs_session first")
        self._open, self._bytes, self._calls = True, 0, 0
        self._in_place = {}

    def end(self) -> None:
        if not self._open:
            raise ferry.UsageError("destroy_agrs_session: no session is open")
        self._open, self._in_place = False, {}

    def in_place(self, shapes: Any, dtype: Any) -> list[Any]:
        """This rank's parts of new arrays, which all_gather then fills in place."""
        self._require_open("agrs_get_inplace_tensor")
        made = []
        for shape in shapes_of(shapes):
            gathered = self._empty((self._exchanges.rank.size, *shape), dtype)
            own = gathered[self._exchanges.rank.index]
            self._in_place[_address(own)] = gathered
            made.append(own)
        return made

    def all_gather(self, arrays_given: tuple[Any, ...]) -> tuple[list[Any], Callable[[], None]]:
        """(arrays [R, ...], a function that makes the current stream wait for them)."""
        try:
            self._require_open("all_gather")
            for array in arrays_given:
                if not hasattr(array, "nbytes") or not hasattr(array, "reshape"):
                    raise ferry.UsageError(f"all_gather: expected tensors or arrays, got {type(array).__name__}")
            needed = sum(rounded_up(self._exchanges.rank.size * _bytes(array), GATHER_UNIT) for array in arrays_given)
            if self._calls == self._most_calls or self._bytes + needed > self._most_bytes:
                raise ferry.UsageError(
                    f"all_gather: call {self._calls + 1} of the session, with {self._bytes + needed} bytes so far; agrs_set_config "
                    f"said at most {self._most_calls} calls and {self._most_bytes} bytes")
        except BaseException as error:
            self._exchanges.refuse_gather(error)
        exchange = self._exchanges.for_gathers(arrays_of(arrays_given[0]).on_device)
        with _CallScope(self._streams, arrays_given[0], None, True) as scope:
            gathered = [self._gather(exchange, array) for array in arrays_given]
            event = scope.finish(list(arrays_given), gathered)
        self._calls, self._bytes = self._calls + 1, self._bytes + needed
        return gathered, event.current_stream_wait

    def _gather(self, exchange: ferry.Exchange, array: Any) -> Any:
        arrays, ranks = arrays_of(array), self._exchanges.rank.size
        gathered = self._in_place.get(_address(array))
        if gathered is None:
            gathered = arrays.empty((ranks, *array.shape), arrays.type_name(array), array)
        if _bytes(array):
            with self._exchanges.call(exchange, ELASTIC_GATHER):
                exchange.all_gather_v(arrays.bytes_of(array.reshape(1, -1)), arrays.bytes_of(gathered.reshape(ranks, -1)))
        return gathered

    def _require_open(self, name: str) -> None:
        if not self._open or not self._most_bytes:
            raise ferry.UsageError(f"{name}: needs an open session: call agrs_set_config, then create_agrs_session or "
                                   "`with agrs_new_session():`")

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if type(dtype).__module__.startswith("torch"):
            import torch

            return torch.empty(shape, dtype=dtype, device="cuda" if self._exchanges.gathers_on_device else None)
        import numpy

        return numpy.empty(shape, dtype)


def _bytes(array: Any) -> int:
    return int(array.nbytes)


def _address(array: Any) -> tuple[int, int]:
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data, _bytes(array)
