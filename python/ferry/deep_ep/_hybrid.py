"""HybridEPBuffer: the methods of the interface, their arguments and results."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ferry
from ferry._call_shapes import SharedByCopies, refusing_misfits
from ferry.deep_ep import _layout
from ferry.deep_ep._arguments import integer
from ferry.deep_ep._exchanges import HYBRID_COMBINE, HYBRID_DISPATCH_AGAIN, METHODS, device_engine_of, group_of
from ferry.deep_ep._hybrid_calls import Calls, Dispatch, Handle, HybridExchanges
from ferry.deep_ep._hybrid_config import BufferConfig, Configurer, HybridEpConfigInstance
from ferry.deep_ep._hybrid_routes import Routes, indices_to_map, read_array, rows_of

_Settings = Callable[[int, int], "tuple[int, int | None, HybridEpConfigInstance]"]


@dataclasses.dataclass
class _Routing:
    """The routes and probabilities of a call, by map or by top-k ids, as the caller passes them."""

    routing_map: Any
    probs: Any
    topk_idx: Any
    topk_weights: Any
    num_of_experts: Any

    def dense(self, tokens: int) -> tuple[Any, Any, int]:
        """(routing_map or None, probs or None, the most experts of a token)"""
        if self.routing_map is not None or self.topk_idx is None:
            return self.routing_map, self.probs, _layout.MOST_SLOTS
        if self.num_of_experts is None:
            raise ferry.UsageError("num_of_experts: expected with topk_idx")
        routing_map, probs = indices_to_map(self.topk_idx, self.topk_weights, tokens, self.num_of_experts)
        return routing_map, probs, max(1, self.topk_idx.shape[1])


class HybridEPBuffer(SharedByCopies):
    """Expert-parallel communication of one rank. T tokens, E experts, R ranks, L = E/R, H columns; E_node: experts of a node."""

    @refusing_misfits("hidden_dim")
    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ):
        """`group`: a process group, or a ferry.Group or ferry.Rank. Collective.

        num_sms_dispatch_api and num_sms_combine_api bound the SMs of calls on GPUs; later arguments have no effect. Nodes
        are those of the group.
        """
        made = group_of(group, None, "HybridEPBuffer")
        error = None
        try:
            config = BufferConfig(
                integer("hidden_dim", hidden_dim, 1), integer("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank),
                integer("num_local_experts", num_local_experts, 1), use_fp8=bool(use_fp8))
            sms = integer("num_sms_dispatch_api", num_sms_dispatch_api or 0), integer("num_sms_combine_api", num_sms_combine_api or 0)
        except BaseException as wrong:
            error = wrong
        self.exchanges = HybridExchanges(made, device_engine_of(group), error)
        rank, topology = self.exchanges.rank, self.exchanges.topology
        self.group = group
        self.rank = rank.index
        self.group_size = rank.size
        self.node_rank = topology.node_of(rank.index)
        self.local_rank = topology.local_rank_of(rank.index)
        self.num_of_nodes = topology.nodes
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = len(topology.ranks_of(self.node_rank))
        config.num_of_nodes = self.num_of_nodes
        config.num_of_ranks_per_node = self.num_of_hybrid_ep_ranks_per_nvlink_domain
        self.configurer = Configurer(config)
        self._calls = Calls(self.exchanges, sms)
        self._open = True

    def destroy(self) -> None:
        """Frees all memory. Later calls raise UsageError."""
        self._open = False
        self.exchanges.close()

    def empty_jit_cache(self) -> None:
        """Does nothing: Ferry compiles no kernels at run time."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """The configuration of a call with these settings; more tokens than so far raise max_num_of_tokens_per_rank.

        Other names of Hybrid-EP's configuration are accepted and have no effect.
        """
        return self.configurer.updated(
            kwargs, hidden_dim=hidden_dim, max_num_of_tokens_per_rank=num_of_tokens_per_rank,
            num_of_experts_per_rank=num_local_experts, pad_multiple=pad_multiple, use_fp8=use_fp8)

    @refusing_misfits("hidden")
    def dispatch(
        self,
        hidden: Any,
        scaling_factor: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_of_experts: int | None = None,
        probs: Any = None,
        routing_map: Any = None,
        num_dispatched_tokens_tensor: Any = None,
        num_dispatched_tokens: int | None = None,
        handle: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """(dispatched_hidden [rows, H], dispatched_probs float32 [rows, E_node] or None, scaling factors or None, handle).

        `hidden`: bfloat16 [T, H], or fp8 or uint8 with scaling_factor float32 [T, H/128]. Routes are routing_map,
        bool [T, E], with probs float32 [T, E]; or topk_idx [T, K] with topk_weights; or those of a handle. One row for
        each token with experts on this rank, by source rank, then token. The columns of other ranks' experts in
        dispatched_probs are 0. The numbers of dispatched tokens have no effect.
        """
        routing = _Routing(routing_map, probs, topk_idx, topk_weights, num_of_experts)
        if handle is not None:
            rows, weight, factors = self._dispatch_again(handle, False, hidden, scaling_factor, routing)
        else:
            rows, weight, factors, _, handle = self._dispatch(
                hidden, scaling_factor, routing, blocking=True,
                settings=lambda tokens, columns: (0, None, self.update_template_config(columns, tokens)))
        return rows, None if weight is None else self._by_expert_of_node(handle, weight), factors, handle

    @refusing_misfits("hidden")
    def combine(self, hidden: Any, probs: Any = None, handle: Any = None) -> tuple[Any, Any]:
        """(bfloat16 [T, H], float32 [T, E] or None): the sums of each token's rows and, by expert, of its probs.

        `hidden`: bfloat16 [rows, H], `probs`: float32 [rows, E_node], of which the columns of this rank's experts are read.
        """
        return self._combine(handle, False, hidden, probs)

    @refusing_misfits("hidden")
    def dispatch_with_permute(
        self,
        *,
        hidden: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Any = None,
        probs: Any = None,
        scaling_factor: Any = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: Any = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """(dispatched_hidden [rows, H], dispatched_probs float32 [rows] or None, scaling factors or None,
        tokens_per_expert int64 [L], handle).

        One row for each token and expert of this rank: by expert, then source rank, then token. The rows of an expert are
        followed by zeros up to a multiple of pad_multiple, which tokens_per_expert counts. Arguments as dispatch().

        num_permuted_tokens: the rows to return. Rows past it are dropped, and overflow_flag of the handle is 1. With
        non_blocking it is needed; the host waits for nothing on GPUs, and tokens_per_expert is there.
        """
        if num_dispatched_tokens is not None:
            warnings.warn("num_dispatched_tokens is deprecated and has no effect", stacklevel=2)
        if use_host_meta is not None:
            warnings.warn("use_host_meta is deprecated: pass non_blocking", stacklevel=2)
            non_blocking = not use_host_meta
        routing = _Routing(routing_map, probs, topk_idx, topk_weights, num_of_experts)
        if handle is not None:
            rows, weight, factors = self._dispatch_again(
                handle, True, hidden, scaling_factor, routing, num_permuted_tokens=num_permuted_tokens, pad_multiple=pad_multiple)
            return rows, weight, factors, None, handle

        def settings(tokens: int, columns: int) -> tuple[int, int | None, HybridEpConfigInstance]:
            config = self.update_template_config(columns, tokens, num_of_experts_per_rank, pad_multiple or None, use_fp8)
            return config.pad_multiple, _limit(num_permuted_tokens, config.pad_multiple, non_blocking), config

        return self._dispatch(hidden, scaling_factor, routing, blocking=not non_blocking, settings=settings, use_fp8=use_fp8)

    @refusing_misfits("hidden")
    def combine_with_unpermute(
        self,
        *,
        hidden: Any,
        probs: Any = None,
        handle: Any = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Any, Any]:
        """(bfloat16 [T, H], float32 [T, E] or None): the sums of each token's rows, and its rows' probs by expert.

        `hidden`: bfloat16 [rows, H], `probs`: float32 [rows], in the rows of dispatch_with_permute.
        """
        if num_dispatched_tokens is not None:
            warnings.warn("num_dispatched_tokens is deprecated and has no effect", stacklevel=2)
        return self._combine(handle, True, hidden, probs)

    # What the four calls share.

    def _dispatch(self, hidden: Any, scaling_factor: Any, routing: _Routing, blocking: bool, settings: _Settings,
                  use_fp8: Any = None) -> tuple[Any, ...]:
        """`settings(T, H)`: (alignment, num_permuted_tokens or None, configuration)."""
        self._require_open()
        try:
            rows = rows_of(hidden, scaling_factor)
            if use_fp8 is not None and bool(use_fp8) != (rows.scales > 0):
                raise ferry.UsageError(f"use_fp8 is {bool(use_fp8)}, but hidden is {rows.arrays.type_name(rows.parts[0])}")
            routing_map, probs, slots = routing.dense(rows.tokens)
            if routing_map is None:
                raise ferry.UsageError("dispatch: without a handle pass routing_map or topk_idx")
            routes = Routes.of(rows.arrays, routing_map, rows.tokens, slots)
            if blocking or not rows.arrays.on_device:
                routes.require_slots()
            alignment, limit, config = settings(rows.tokens, rows.hidden)
            if routes.experts != config.num_of_experts_per_rank * self.group_size:
                raise ferry.UsageError(
                    f"routing_map: expected {config.num_of_experts_per_rank} experts on each of {self.group_size} ranks, got {routes.experts}")
            call = Dispatch(rows, routes, routes.by_slot(rows.arrays, probs), alignment, blocking, limit, config)
        except BaseException as error:
            self.exchanges.refuse_dispatch(error, blocking)
        return self._calls.dispatch(call)

    def _dispatch_again(self, handle: Any, permuted: bool, hidden: Any, scaling_factor: Any, routing: _Routing, **given: Any) -> tuple[Any, ...]:
        self._require_open()
        with self._refusing(handle, permuted, HYBRID_DISPATCH_AGAIN):
            plan, config = handle.plan, handle.config
            rows = rows_of(hidden, scaling_factor, plan.tokens, config.hidden_dim)
            for name, expected in (("num_permuted_tokens", handle.rows), ("pad_multiple", config.pad_multiple)):
                number = expected if given.get(name) is None else integer(name, given[name])
                if number != expected and not (name == "pad_multiple" and max(number, 1) == expected):
                    raise ferry.UsageError(f"{name} = {number}, but the dispatch of the handle has {expected}")
            weights = handle.routes.by_slot(rows.arrays, routing.dense(plan.tokens)[1])
        return self._calls.dispatch_again(handle, rows, weights)

    def _combine(self, handle: Any, permuted: bool, hidden: Any, probs: Any) -> tuple[Any, Any]:
        self._require_open()
        with self._refusing(handle, permuted, HYBRID_COMBINE):
            arrays = handle.arrays
            hidden = read_array("hidden", hidden, arrays, ("bfloat16",), (handle.rows, handle.config.hidden_dim))
            if probs is not None:
                shape = (handle.rows,) if permuted else (handle.rows, self._experts_of_node(handle))
                probs = read_array("probs", probs, arrays, ("float32",), shape)
                if not permuted:
                    first, mine = self._columns_in_node(handle)
                    probs = arrays.gathered(handle.local_ids[: handle.rows], probs[:, first : first + mine])
        combined, by_slot = self._calls.combine(handle, hidden, probs)
        if by_slot is None:
            return combined, None
        return combined, arrays.scattered(handle.routes.ids, by_slot, handle.routes.experts)

    def _experts_of_node(self, handle: Handle) -> int:
        return handle.config.num_of_experts_per_rank * self.num_of_hybrid_ep_ranks_per_nvlink_domain

    def _columns_in_node(self, handle: Handle) -> tuple[int, int]:
        """(first, L): the columns of this rank's experts among those of its node."""
        mine = handle.config.num_of_experts_per_rank
        return self.local_rank * mine, mine

    def _by_expert_of_node(self, handle: Handle, weight: Any) -> Any:
        """float32 [rows, E_node] of weights by slot, [rows, K]."""
        arrays, ids = handle.arrays, handle.local_ids[: handle.rows]
        first, _ = self._columns_in_node(handle)
        return arrays.scattered(arrays.where(ids >= 0, ids + first, -1), weight, self._experts_of_node(handle))

    def _require_open(self) -> None:
        if not self._open:
            raise ferry.UsageError("HybridEPBuffer: destroy() was called")

    @contextlib.contextmanager
    def _refusing(self, handle: Any, permuted: bool, call: int) -> Iterator[None]:
        """What is wrong with this rank's arguments of a call with a handle ends the peers' calls."""
        exchange = None
        try:
            if not isinstance(handle, Handle) or handle.owner is not self.exchanges:
                raise ferry.UsageError(f"handle: expected what a dispatch of this buffer returned, got {type(handle).__name__}")
            if handle.permuted != permuted:
                permute, unpermute = ("_with_permute", "_with_unpermute") if handle.permuted else ("", "")
                raise ferry.UsageError(
                    f"handle: it has {len(handle)} elements, of dispatch{permute}: use combine{unpermute} and dispatch{permute} with it")
            exchange = handle.exchange
            yield
        except BaseException as error:
            self.exchanges.refuse(call, error, exchange, METHODS[call])


def _limit(num_permuted_tokens: Any, pad_multiple: int, non_blocking: bool) -> int | None:
    if num_permuted_tokens is None:
        if non_blocking:
            raise ferry.UsageError("num_permuted_tokens: expected with non_blocking")
        return None
    limit = integer("num_permuted_tokens", num_permuted_tokens)
    if limit % pad_multiple != 0:
        raise ferry.UsageError(f"num_permuted_tokens = {limit}, must be a multiple of pad_multiple = {pad_multiple}")
    return limit
