"""ElasticBuffer: the methods of DeepEP V2's interface, their arguments and results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import ferry
from ferry._call_shapes import SharedByCopies, refusing_misfits
from ferry._core import _CallStreams
from ferry.deep_ep import _elastic_sizes as sizes
from ferry.deep_ep._arguments import integer
from ferry.deep_ep._elastic_calls import Dispatch, ElasticCalls, Settings
from ferry.deep_ep._elastic_exchanges import ElasticExchanges
from ferry.deep_ep._elastic_gather import Sessions
from ferry.deep_ep._elastic_handle import EPHandle
from ferry.deep_ep._exchanges import device_engine_of, group_of
from ferry.deep_ep.utils import EventHandle, EventOverlap

DEFAULT_QPS = 17


def _refused(name: str, what: str) -> Callable[..., Any]:
    """A method that the interface has and Ferry does not offer."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise ferry.UnsupportedError(f"ElasticBuffer.{name}: {what}")

    method.__name__ = name
    method.__doc__ = f"Raises UnsupportedError: {what}."
    return method


_NO_ENGRAM = "Ferry stores no Engram entries: it moves tokens to experts and back"
_NO_PIPELINE = "Ferry does not send between pipeline stages: use send and recv of torch.distributed"


class ElasticBuffer(SharedByCopies):
    """Expert-parallel communication of one rank. N tokens, K slots a token, E experts, R ranks, L experts on this rank, H columns.

    M is num_max_tokens_per_rank, the same on every rank, as are num_experts, expert_alignment, do_expand and do_cpu_sync.
    """

    @refusing_misfits("num_max_tokens_per_rank")
    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """`group`: a process group, or a ferry.Group or ferry.Rank. Collective.

        num_max_tokens_per_rank: M of dispatches that do not pass it; their exchange has room for at least that.
        allow_multiple_reduction: False adds the rows of a token at once, in fp32, which sends more rows in the expanded layout.
        num_gpu_timeout_secs, num_cpu_timeout_secs: the smaller one is how long a wait of a call may last.

        num_bytes, hidden, num_topk, use_fp8_dispatch, sl_idx and num_allocated_qps are accepted and have no effect: the first
        call of a shape makes the memory it needs. deterministic and allow_hybrid_mode have none either: the order of rows is
        always fixed. num_cpu_bytes, for Engram, raises UnsupportedError.
        """
        made = group_of(group, None, "ElasticBuffer")
        error = None
        settings, deadline = (0, 0), None
        try:
            if integer("num_cpu_bytes", num_cpu_bytes):
                raise ferry.UnsupportedError(f"ElasticBuffer: num_cpu_bytes = {num_cpu_bytes}: {_NO_ENGRAM}")
            settings = (integer("num_max_tokens_per_rank", num_max_tokens_per_rank), int(bool(allow_multiple_reduction)))
            deadline = float(min(num_cpu_timeout_secs, num_gpu_timeout_secs))
            if not deadline > 0:
                raise ferry.UsageError(f"ElasticBuffer: a timeout of {deadline} s, must be above 0")
            ranks, self.num_max_tokens_per_rank = sizes.ranks_of(group), settings[0]
            hint = sizes.buffer_bytes(ranks, settings[0], integer("hidden", hidden), integer("num_topk", num_topk))
            self.num_bytes = hint if num_bytes is None else num_bytes
            self.num_allocated_qps = integer("num_allocated_qps", num_allocated_qps) or DEFAULT_QPS
        except BaseException as wrong:
            error = wrong
        self._exchanges = ElasticExchanges(made, device_engine_of(group), deadline, settings, error)
        topology = self._exchanges.topology
        self.group = group
        self.rank_idx, self.num_ranks = self._exchanges.rank.index, topology.ranks
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.runtime = self._exchanges.group
        self._streams = _CallStreams()
        self._calls = ElasticCalls(self._streams, self._exchanges)
        self._sessions = Sessions(self._streams, self._exchanges)

    def destroy(self) -> None:
        """Frees all memory. Only for buffers made with explicitly_destroy=True."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        if self.runtime is not None:
            self._exchanges.close()
            self.runtime = None

    def _require_open(self) -> None:
        if self.runtime is None:
            raise ferry.UsageError("ElasticBuffer: used after destroy()")

    # Queries.

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes, a multiple of 2 MiB, that an exchange of such dispatches takes on one node. 0 if M or H is 0."""
        return sizes.buffer_bytes(sizes.ranks_of(group), num_max_tokens_per_rank, hidden, num_topk)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: Any) -> int:
        """Bytes of a session that gathers tensors of these shapes, or of one; each takes a multiple of 32 bytes."""
        return sizes.session_bytes(sizes.ranks_of(group), shapes, dtype)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """num_max_session_bytes rounded up to a multiple of 2 MiB. Ferry makes the memory of each call."""
        return sizes.rounded_up(num_max_session_bytes, sizes.BUFFER_UNIT)

    @staticmethod
    def capture() -> EventHandle:
        """Records an event on the current stream, for `previous_event`."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The private stream of asynchronous calls; None without a GPU."""
        return self._streams.private_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, the most ranks of a node)."""
        topology = self._exchanges.topology
        return topology.nodes, max(len(topology.ranks_of(node)) for node in range(topology.nodes))

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, R): all ranks are one domain, on several nodes too."""
        return 1, self._exchanges.topology.ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs that keep the link to the other ranks busy, an even number: what calls with num_sms=0 use.

        rdma_gbs, nvlink_gbs: of the link, in GB/s; 0: 50 between nodes, 450 within one. sm_write_gbs: what an SM writes. The
        other arguments have no effect, because rows are written once for each rank whatever the routing.
        """
        return sizes.theoretical_sms(
            self._exchanges.topology, rdma_gbs, nvlink_gbs, sm_write_gbs, bool(self.prefer_overlap_with_compute))

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """num_sms, at most num_allocated_qps. Calls use no queue pairs of their own."""
        return min(num_sms, self.num_allocated_qps)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits until all ranks are here. Collective. The host waits, for this rank's GPU first."""
        self._require_open()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._exchanges.barrier()

    # Dispatch and combine.

    @refusing_misfits("x")
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Any, Any, EPHandle, EventOverlap]:
        """(recv_x, recv_topk_idx, recv_topk_weights, handle, event). Collective.

        x: bfloat16 [N, H], or (float8_e4m3fn [N, H], scales float32 or int32 [N, n], any strides).
        topk_idx: int64 or int32 [N, K], -1 for a masked slot. topk_weights: float32 [N, K] or None, on all ranks alike.
        handle: of an earlier dispatch, whose routes and layout are used again; then topk_idx is None.

        do_expand=False: a row for each token and rank, by source rank, then token; recv_topk_idx [rows, K] has local ids, -1
        where the expert is elsewhere, recv_topk_weights [rows, K] 0 there.
        do_expand=True: a row for each route, by local expert, source rank, token; the first row of an expert is a multiple of
        expert_alignment; recv_topk_idx is None, recv_topk_weights [rows] 0 on padding, which do_zero_padding clears in recv_x.

        do_cpu_sync: the host waits for the counts of all ranks, and there are just the rows that arrive, padding included.
        Otherwise there are R * M rows, or with do_expand R * M * min(K, L) + L * (expert_alignment - 1), rounded up to a multiple
        of expert_alignment, and the device alone knows how many of them arrived. Default: True without a handle.
        use_tma_aligned_col_major_sf: received scales have strides (1, rows rounded up to a multiple of 4).
        cumulative_local_expert_recv_stats: int32 [L], to which the rows of each expert are added; not with a handle.
        """
        self._require_open()
        given = Dispatch(x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
                         expert_alignment, handle, do_handle_copy, do_cpu_sync, do_expand, do_zero_padding,
                         use_tma_aligned_col_major_sf)
        settings = Settings(num_sms, previous_event, previous_event_before_epilogue, async_with_compute_stream)
        call = self._calls.dispatch if handle is None else self._calls.dispatch_again
        return call(given, settings, self.get_theoretical_num_sms)

    @refusing_misfits("x")
    def combine(
        self,
        x: Any,
        handle: EPHandle,
        topk_weights: Any = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, EventOverlap]:
        """(combined_x bfloat16 [N, H], combined_topk_weights float32 [N, K] or None, event). Collective.

        x: bfloat16 [rows, H], rows as the dispatch of the handle returned. The unweighted sum of a token's rows, plus up to two
        biases, bfloat16 [N, H]. topk_weights: float32 [rows, K], or of the expanded layout [rows]; they go back to their slots.
        """
        self._require_open()
        settings = Settings(num_sms, previous_event, previous_event_before_epilogue, async_with_compute_stream)
        return self._calls.combine(x, handle, topk_weights, bias, settings)

    # Sessions of all_gather.

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Sets the most bytes of gathered tensors and the most calls of a session."""
        self._require_open()
        self._sessions.set_config(integer("num_max_session_bytes", num_max_session_bytes, 1),
                                  integer("num_max_all_gathers_per_session", num_max_all_gathers_per_session, 1))

    def create_agrs_session(self) -> None:
        """Begins a session."""
        self._require_open()
        self._sessions.begin()

    def destroy_agrs_session(self) -> None:
        """Ends the session. Its tensors stay valid."""
        self._sessions.end()

    @contextlib.contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session as a context; with enabled=False none."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: Any) -> Any:
        """Tensors for this rank's part, which all_gather does not copy: one for a shape, a tuple for several."""
        self._require_open()
        made = self._sessions.in_place(shapes, dtype)
        return made[0] if all(isinstance(length, int) for length in shapes) else tuple(made)

    def all_gather(self, t: Any) -> tuple[Any, ...]:
        """(gathered [R, ...], wait) of a tensor, (*gathered, wait) of several: the tensors of all ranks. Collective.

        `wait()` makes the current stream wait for them. Every rank passes the same shapes, within a session.
        """
        self._require_open()
        several = isinstance(t, (tuple, list))
        gathered, wait = self._sessions.all_gather(tuple(t) if several else (t,))
        return (*gathered, wait)

    # What Ferry does not offer.

    get_engram_storage_size_hint = staticmethod(_refused("get_engram_storage_size_hint", _NO_ENGRAM))
    engram_write = _refused("engram_write", _NO_ENGRAM)
    engram_fetch = _refused("engram_fetch", _NO_ENGRAM)
    get_pp_buffer_size_hint = staticmethod(_refused("get_pp_buffer_size_hint", _NO_PIPELINE))
    pp_set_config = _refused("pp_set_config", _NO_PIPELINE)
    pp_send = _refused("pp_send", _NO_PIPELINE)
    pp_recv = _refused("pp_recv", _NO_PIPELINE)
