"""Which routes the capacity of an expert keeps: the drop policies of Megatron-Core, and their names."""

from __future__ import annotations

import math

import torch
from torch import library

import ferry
from ferry.torch._functions import _new_call_token, _refuse
from ferry.torch._operators import _library
from ferry.torch._registry import exchange_of, handle_of

POLICIES = ("probs", "position")


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Rows of an expert, as Megatron-Core counts them: ceil(num_tokens / num_experts * capacity_factor), at least `min_capacity`.

    `num_tokens` counts a token once for each of its experts: tokens * top_k.
    """
    capacity = math.ceil((num_tokens / num_experts) * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def _ordinals(experts, weights):
    """[M] how many routes of the same expert precede each of the routes: those of larger weights, ties in their order; without
    weights those before it."""
    if weights is None:
        order = torch.argsort(experts, stable=True)
    else:
        by_weight = torch.argsort(weights, descending=True, stable=True)
        order = by_weight[torch.argsort(experts[by_weight], stable=True)]
    of = experts[order]
    ordinals = torch.empty_like(order)
    ordinals[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(of, of)
    return ordinals


def _gathered(exchange, mine, lane):
    """[R, ...] `mine` of every rank. Rows of a gather are multiples of 16 bytes."""
    out = torch.empty((exchange.ranks * mine.shape[0], *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
    return exchange.all_gather_v(mine, out, lane=lane).view(exchange.ranks, *mine.shape)


def _fault_in_group(ids, weights, exchange):
    """What is wrong with the arguments; empty: nothing."""
    config = exchange.config
    if config.layout != "expert_padded" or config.input != "own" or config.placement.tp > 1:
        return (f"needs an exchange with layout 'expert_padded', input 'own' and whole experts; it has {config.layout!r}, {config.input!r} "
                f"and {config.placement.tp} slices of an expert")
    if config.placement.has_replicas:
        return "does not take a placement with replicas: an expert's room depends on the replica that each route takes"
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or ids.shape[0] > config.max_tokens or ids.shape[1] != config.top_k:
        return (f"ids: expected int32 or int64 of at most {config.max_tokens} tokens and {config.top_k} slots, got {ids.dtype} "
                f"{list(ids.shape)}")
    if weights is not None and (weights.dtype != torch.float32 or weights.shape != ids.shape):
        return f"weights: expected float32 {list(ids.shape)}, got {weights.dtype} {list(weights.shape)}"
    return ""


def _drop_in_group(ids, weights, exchange, lane, call_token=None):
    exchange = exchange_of(exchange)
    fault = _fault_in_group(ids, weights, exchange)
    if fault:
        _refuse(exchange, "all_gather_v", lane, f"drop_routes: {fault}")
    config, (tokens, top_k) = exchange.config, ids.shape
    known = (ids >= 0) & (ids < config.experts)  # dispatch reports the others
    experts = torch.where(known, ids, config.experts).to(torch.int32)
    if weights is None:
        # Only the counts of lower ranks matter: [E + 1] of each rank.
        flat = experts.reshape(-1).long()
        counts = torch.zeros((1, -(-(config.experts + 1) // 4) * 4), dtype=torch.int32, device=ids.device)
        counts[0].scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        before = _gathered(exchange, counts, lane)[: exchange.rank].sum((0, 1))
        ordinals = (_ordinals(flat, None) + before[flat]).view(ids.shape)
    else:
        # As many rows on every rank, so that no rank needs to know how many tokens the others have.
        mine = torch.full((config.max_tokens, -(-2 * top_k // 4) * 4), config.experts, dtype=torch.int32, device=ids.device)
        mine[:tokens, :top_k] = experts
        mine[:tokens, top_k : 2 * top_k] = weights.contiguous().view(torch.int32)
        everything = _gathered(exchange, mine, lane)
        all_weights = everything[..., top_k : 2 * top_k].contiguous().view(torch.float32)
        ordinals = _ordinals(everything[..., :top_k].reshape(-1), all_weights.view(-1))
        ordinals = ordinals.view(exchange.ranks, config.max_tokens, top_k)[exchange.rank, :tokens]
    return torch.where(known & (ordinals >= exchange.capacity), -1, ids)


_library.define("drop_routes(Tensor ids, Tensor? weights, int exchange, int lane, Tensor? call_token=None) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("drop_routes", _drop_in_group, _key)
library.register_fake("ferry::drop_routes", lambda ids, *_: torch.empty_like(ids), lib=_library)
torch.fx.node.has_side_effect(torch.ops.ferry.drop_routes.default)


def drop_routes(
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    drop_policy: str = "probs",
    capacity: int | None = None,
    exchange: ferry.Exchange | int | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """`ids` [N, K] with -1 in the slots that no expert has room for. Dispatch these; a dropped slot adds nothing to combine.

    drop_policy   'probs': an expert keeps the routes of the largest `weights`, float32 [N, K]; ties, and with 'position' all
                  routes, in the order of rows: rank, token, slot
    capacity      routes that each expert keeps of this rank's. No rank needs another, as in Megatron-Core's router
    exchange      instead: each expert keeps as many routes of all ranks as the exchange has room for (layout 'expert_padded').
                  Collective: an all-gather, of the counts [E] for 'position', of ids and weights for 'probs'

    The host waits for nothing on GPUs, and shapes do not depend on the routes. Raises ferry.UsageError for arguments that do not
    fit; with an exchange the peers' calls end with it too.
    """
    fault = ""
    if drop_policy not in POLICIES:
        fault = f"drop_policy: {drop_policy!r} is not one of {', '.join(POLICIES)}"
    elif drop_policy == "probs" and weights is None:
        fault = "weights: drop_policy 'probs' needs them, float32 [N, K]"
    elif exchange is not None and capacity is not None:
        fault = f"capacity: {capacity}, but an exchange has its own: leave one of the two out"
    elif exchange is None and (capacity is None or capacity < 1):
        fault = f"capacity: {capacity}, must be the rows that an expert keeps, 1 or more; or pass an exchange, which has them"
    if fault and exchange is not None:
        _refuse(exchange, "all_gather_v", lane, f"drop_routes: {fault}")
    if fault:
        raise ferry.UsageError(f"drop_routes: {fault}")
    by = weights.detach() if weights is not None and drop_policy == "probs" else None
    if exchange is not None:
        handle = exchange if isinstance(exchange, int) else handle_of(exchange)
        return torch.ops.ferry.drop_routes.default(ids, by, handle, lane, _new_call_token(ids))
    ordinals = _ordinals(ids.reshape(-1), None if by is None else by.reshape(-1)).view(ids.shape)
    return torch.where((ids >= 0) & (ordinals >= capacity), -1, ids)
