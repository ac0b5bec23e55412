"""What a lane of ferry.max keeps on device memory: tensors that kernels on the current stream read and write."""

from __future__ import annotations

from typing import Any

import ferry
from ferry import _core
from ferry.deep_ep._arrays import arrays_of


def typed(name: str, array: Any, types: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
    """`array`, whose type and shape are checked; None matches any length."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise ferry.UsageError(f"{name}: a {type(array).__name__}, must be an array; pass what dispatch returned")
    type_name, lengths = arrays_of(array).type_name(array), tuple(array.shape)
    if type_name not in types or len(lengths) != len(shape) or any(
            want not in (None, have) for want, have in zip(shape, lengths)):
        expected = ", ".join("any" if length is None else str(length) for length in shape)
        raise ferry.UsageError(f"{name}: {type_name} {list(lengths)}, must be {' or '.join(types)} [{expected}]; pass what "
                               "dispatch returned")
    return array


class DeviceLane:
    """The counterpart of ferry.max's lanes of host memory. The tensors of a call live until the next one has been enqueued."""

    def __init__(self, exchange: ferry.Exchange):
        self.exchange = exchange
        self.pending = ""
        self.tokens = 0  # N of the last dispatch
        self.memory: dict[str, Any] = {}  # by the first call, which shows where tensors are

    def keep(self, topk_ids: Any, lane: int) -> None:
        config, torch = self.exchange.config, arrays_of(topk_ids).torch
        if not self.memory:
            device = topk_ids.device
            self.memory = {"ids": torch.zeros(config.max_tokens * config.top_k + 1, dtype=torch.int64, device=device),
                           "tokens": torch.zeros(1, dtype=torch.int32, device=device),
                           "plan": torch.zeros(self.exchange.plan_bytes, dtype=torch.uint8, device=device),
                           "tags": torch.zeros(self.exchange.capacity, dtype=torch.float32, device=device),
                           "scratch": torch.zeros(_core._max_scratch_bytes(self.exchange), dtype=torch.uint8, device=device)}
        self.tokens = len(topk_ids)
        dense = topk_ids.contiguous()
        _core._max_keep_ids(self.exchange, lane, dense.data_ptr(), dense.dtype == torch.int64, self.tokens, self._address("ids"),
                            self._address("tokens"), self._stream())

    def describe(self, received: ferry.DispatchResult, lane: int) -> tuple[Any, ...]:
        torch, device = arrays_of(received.data).torch, received.data.device
        groups, ranks = len(received.counts), self.exchange.ranks

        def empty(shape: tuple[int, ...], dtype: Any) -> Any:
            return torch.empty(shape, dtype=dtype, device=device)

        offsets, ids, stats = empty((groups + 1,), torch.uint32), empty((groups,), torch.int32), empty((2,), torch.uint32)
        info, counts = empty((self.exchange.capacity, 2), torch.int32), empty((groups, ranks), torch.int32)
        _core._max_describe_rows(self.exchange, lane, received, offsets.data_ptr(), ids.data_ptr(), stats.data_ptr(),
                                 info.data_ptr(), counts.data_ptr(), self._stream())
        return received.data, received.scales, offsets, ids, stats, info, counts, received.parts, received.tile_offsets

    def plan(self, src_info: Any, row_offsets: Any, counts: Any, topk_ids: Any, lane: int, like: Any) -> tuple[Any, Any]:
        if not self.memory:
            raise ferry.UsageError("a combine before the lane's first dispatch: dispatch first")
        config, groups = self.exchange.config, config_groups(self.exchange)
        arrays = [self._on_device(name, typed(name, array, (type_name,), shape)) for name, array, type_name, shape in (
            ("src_info", src_info, "int32", (self.exchange.capacity, 2)), ("row_offsets", row_offsets, "uint32", (groups + 1,)),
            ("counts", counts, "int32", (groups, self.exchange.ranks)))]
        ids, tokens, device_tokens = self.memory["ids"], config.max_tokens, self._address("tokens")
        if topk_ids is not None:
            ids = self._on_device("topk_ids", typed("topk_ids", topk_ids, ("int32", "int64"), (None, config.top_k)))
            tokens, device_tokens = len(ids), 0
        _core._max_plan_return(
            self.exchange, lane, *(array.data_ptr() for array in arrays), tuple(array.numel() for array in arrays), ids.data_ptr(), ids.element_size() == 8, tokens,
            device_tokens, self._address("plan"), self._address("tags"), self._address("scratch"), 0, self._stream())
        plan = self.exchange.plan_over(self.memory["plan"], tokens=self.tokens if topk_ids is None else tokens)
        return plan, self.memory["tags"]

    def check(self, returned: Any, lane: int) -> None:
        """An error is raised by Exchange.synchronize()."""
        _core._max_check_returned(self.exchange, lane, self._address("plan"), returned.data_ptr(), 0, self._stream())

    def _on_device(self, name: str, array: Any) -> Any:
        device = self.memory["plan"].device
        if getattr(array, "device", None) != device:
            raise ferry.UsageError(f"{name}: must be on {device}; pass what dispatch returned")
        return array.contiguous()

    def _address(self, name: str) -> int:
        return self.memory[name].data_ptr()

    def _stream(self) -> int:
        memory = self.memory["plan"]
        return arrays_of(memory).torch.cuda.current_stream(memory.device).cuda_stream


def config_groups(exchange: ferry.Exchange) -> int:
    """Groups of this rank: the shared experts and its own, or its local_slots."""
    config = exchange.config
    return config.shared_experts + (config.local_slots or len(config.placement.experts_of(exchange.rank)))
