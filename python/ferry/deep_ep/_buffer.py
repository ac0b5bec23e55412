"""Buffer: the methods of the interface, their arguments and results."""

from __future__ import annotations

import contextlib
import os

import ferry
from ferry._call_shapes import SharedByCopies, naming, raise_from_call, refusing_misfits
from ferry._core import _CallStreams, _LowLatencyCalls, _NormalCalls
from ferry.deep_ep._arguments import integer
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._config import Config, combine_config, dispatch_config, low_latency_size_hint
from ferry.deep_ep.utils import EventHandle, EventOverlap
from ferry.deep_ep._exchanges import Exchanges, device_engine_of, group_of


def _integer(name: str, value) -> int:
    with contextlib.suppress(Exception):
        number = int(value)
        if -(2**63) <= number < 2**63:
            return number
    raise ferry.UsageError(f"Buffer: {name}: expected an integer, got {value!r}")


class Buffer(SharedByCopies):
    """Expert-parallel communication of one rank. T tokens, K slots a token, E experts, R ranks, L = E/R, H columns."""

    num_sms: int = 20

    @refusing_misfits("enable_shrink")
    def __init__(
        self,
        group,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm=None,
    ):
        """`group`: a process group, or a ferry.Group or ferry.Rank; or `comm`: a communicator of mpi4py. Collective.

        Queue pairs and fabric options are accepted and have no effect, and neither has num_nvl_bytes: the first call of a
        shape makes the buffers it needs. In a group of several nodes num_rdma_bytes must be as large as DeepEP needs it.
        """
        made = group_of(group, comm)
        error, rdma_bytes = None, 0
        try:
            if enable_shrink:
                raise ferry.UnsupportedError("Buffer: enable_shrink is not supported, because a lost rank ends its group")
            if not allow_nvlink_for_low_latency_mode:
                raise ferry.UnsupportedError(
                    "Buffer: allow_nvlink_for_low_latency_mode=False is not supported: ranks of a node reach one another's memory, and use no RDMA")
            rdma_bytes = _integer("num_rdma_bytes", num_rdma_bytes)
            self.nvshmem_qp_depth = _integer("NVSHMEM_QP_DEPTH", os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        except BaseException as wrong:
            error = wrong
        self.exchanges = Exchanges(made, rdma_bytes, device_engine_of(None if comm is not None else group), error)
        self.rank = self.exchanges.rank.index
        self.group_size = self.exchanges.rank.size
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime = self.exchanges.group
        self._streams = _CallStreams()
        self._normal = _NormalCalls(self._streams, self.exchanges, self.exchanges.topology)
        self._low_latency = _LowLatencyCalls(self._streams, self.exchanges)

    def destroy(self) -> None:
        """Frees all memory. Only for buffers made with explicitly_destroy=True."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.exchanges.close()
        self._normal.close()
        self._low_latency.close()
        self.runtime = None

    def _require_open(self) -> None:
        if self.runtime is None:
            raise ferry.UsageError("Buffer: used after destroy()")

    # Queries that need no buffer.

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: fp8 and low-latency mode are always available."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the most SMs, an even number, for calls of every Buffer without a `config`."""
        new_num_sms = integer("set_num_sms: new_num_sms", new_num_sms)
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Records an event on the current stream, for `previous_event`."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of an exchange of low-latency mode with top-8."""
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default `config` of dispatch: Buffer.num_sms SMs, for any number of ranks."""
        return dispatch_config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default `config` of combine: Buffer.num_sms SMs, for any number of ranks."""
        return combine_config(Buffer.num_sms)

    def get_comm_stream(self):
        """The private stream of asynchronous calls; None without a GPU."""
        self._require_open()
        return self._streams.private_stream()

    def get_local_buffer_tensor(self, dtype, size=None, offset: int = 0, use_rdma_buffer: bool = False):
        """Raises UnsupportedError: an exchange's memory is not accessible."""
        raise ferry.UnsupportedError("get_local_buffer_tensor: an exchange's memory is not accessible")

    # Normal mode.

    def get_dispatch_layout(
        self,
        topk_idx,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """(num_tokens_per_rank int32 [R], num_tokens_per_rdma_rank int32 [nodes], num_tokens_per_expert int32 [E],
        is_token_in_rank bool [T, R], event)

        num_tokens_per_rdma_rank is None if all ranks are on one node. For ids [T, K], -1 for a masked slot. Other ids outside [0, E) are not counted; dispatch reports them.
        """
        return self._normal.layout(topk_idx, num_experts, previous_event, async_finish)

    @refusing_misfits("x")
    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event).

        `x`: bfloat16 [T, H], or (float8_e4m3fn [T, H], scales). Returns one row for each token and source rank, by source
        rank, then token. With a handle the routes are those of the call that returned it, and only recv_x and the event
        are set. Otherwise the routes are topk_idx, or is_token_in_rank if there is no topk_idx. The handle has 6 elements
        on one node, and 10 between nodes, where num_tokens_per_rdma_rank is needed.
        """
        if handle is None:
            return self._normal.dispatch(
                x, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment,
                num_worst_tokens, config, Buffer.num_sms, previous_event, async_finish, allocate_on_comm_stream)
        with_ids = topk_idx is not None or topk_weights is not None
        return self._normal.dispatch_by_handle(
            x, handle, with_ids, config, Buffer.num_sms, previous_event, async_finish, allocate_on_comm_stream)

    @refusing_misfits("x")
    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """(combined_x bfloat16 [T, H], combined_topk_weights float32 [T, K] or None, event).

        The unweighted sum of a token's rows over ranks, plus up to two biases, bfloat16 [T, H]. topk_weights are summed by
        slot.
        """
        return self._normal.combine(
            x, handle, topk_weights, bias, config, Buffer.num_sms, previous_event, async_finish, allocate_on_comm_stream)

    @refusing_misfits("x")
    def internode_dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """As dispatch(), for a group of several nodes."""
        self._require_nodes(self.dispatch, handle=handle, num_worst_tokens=num_worst_tokens)
        return self.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
            topk_weights, expert_alignment, num_worst_tokens, config, previous_event, async_finish, allocate_on_comm_stream)

    @refusing_misfits("x")
    def internode_combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ):
        """As combine(), for a group of several nodes."""
        self._require_nodes(self.combine, handle=handle)
        return self.combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream)

    def _require_nodes(self, call, **given):
        if self.exchanges.nodes == 1:
            name = call.__name__
            raise_from_call(call, ferry.UnsupportedError(f"internode_{name}: all ranks are on one node: use {name}()"), "x", given)

    # Low-latency mode.

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: calls need no cleaned buffer."""
        self._require_open()

    @refusing_misfits("x")
    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale=None,
        use_ue8m0_for_sf: bool = False,
    ):
        """(recv, recv_count int32 [L], handle, event, hook).

        recv: bfloat16 [L, R*M, H], or (float8_e4m3fn, scales). Scales are float32 [L, R*M, H/128], or with use_ue8m0
        int32 [L, R*M, H/512] of four exponents each; neighbouring rows are neighbours in memory. Rows of an expert are
        ordered by source rank, then token. dispatch_wait_recv_cost_stats is not written: waits are not measured.

        use_nvfp4 goes before use_fp8: (uint8 [R*M, H/2, L], scales float8_e4m3fn [32, 4, ceil(R*M/128), 4, ceil(H/64), L]),
        both with L first in memory. A value is element * scale / x_global_scale. x_global_scale: a number or float32 of
        one value, or of several equal ones, which on GPUs are not compared; default 1.
        """
        return self._low_latency.dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats, use_fp8,
            round_scale, use_ue8m0, use_nvfp4, x_global_scale, use_ue8m0_for_sf, async_finish, return_recv_hook)

    @refusing_misfits("x")
    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        """(bfloat16 [T, H], event, hook): the sum over K of weight times row; slots of id -1 are skipped.

        If topk_idx is not the array given to dispatch, its slots of -1 are skipped too. With zero_copy the rows are those
        of get_next_low_latency_combine_buffer(handle), and x is ignored. use_logfmt is accepted, but rows are sent as
        bf16. combine_wait_recv_cost_stats is not written.
        """
        return self._low_latency.combine(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out)

    def get_next_low_latency_combine_buffer(self, handle):
        """bfloat16 [L, R*M, H], where zero_copy expects the experts' outputs. Available once dispatch was called."""
        return self._low_latency.next_combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raises UnsupportedError: a lost rank ends its group."""
        raise ferry.UnsupportedError("low_latency_update_mask_buffer: ranks cannot be masked, because a lost rank ends its group")

    def low_latency_query_mask_buffer(self, mask_status) -> None:
        """Writes zeros to int32 [R]: no rank is masked."""
        self._require_open()
        with naming("mask_status"):
            kind, shape = arrays_of(mask_status).type_name(mask_status), list(mask_status.shape)
            if kind != "int32" or shape != [self.group_size]:
                raise ferry.UsageError(f"mask_status: expected int32 of shape [{self.group_size}], got {kind} of shape {shape}")
            mask_status[...] = 0

    def low_latency_clean_mask_buffer(self) -> None:
        """Does nothing: no rank is masked."""
        self._require_open()
