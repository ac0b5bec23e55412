"""A small expert-parallel layer, as a starting point."""

from __future__ import annotations

import torch
from torch import nn

import ferry
from ferry._call_shapes import refusing_construction, refusing_misfits
from ferry.torch._dropping import POLICIES, drop_routes, get_capacity
from ferry.torch._functions import combine, dispatch
from ferry.torch._registry import exchange_with, handle_of, key_of

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class MoE(nn.Module):
    """Router, dispatch, this rank's experts (two linear maps with a SiLU between them), combine.

    Every rank holds the whole router: sum its gradients over ranks, as for any replicated parameter. Every rank holds
    its own experts, w_in [L, H, F] and w_out [L, F, H]. Collective: all ranks construct the layer and call it together.
    A copy, such as copy.deepcopy() and torch.optim.swa_utils.AveragedModel make, shares the layer's exchange, and so does
    a layer that was saved and loaded in the same process. One that was loaded elsewhere needs connect().
    """

    @refusing_misfits("dtype")
    def __init__(
        self,
        group: ferry.Group | ferry.Rank,
        *,
        experts: int,
        top_k: int,
        hidden: int,
        ffn: int,
        max_tokens: int,
        capacity: int = 0,
        capacity_factor: float | None = None,
        drop_policy: str = "probs",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """`capacity`: rows an expert has room for, beyond which OverflowError is raised; 0: R * max_tokens, any routing.

        `capacity_factor` instead: an expert keeps get_capacity(max_tokens * top_k, experts, capacity_factor) routes of each rank,
        those that drop_routes() keeps by `drop_policy`, and its block has R times as many rows.
        """
        super().__init__()
        with refusing_construction(group):
            if drop_policy not in POLICIES:
                raise ferry.UsageError(f"drop_policy: {drop_policy!r} is not one of {', '.join(POLICIES)}")
            if capacity_factor is not None and (capacity or capacity_factor <= 0):
                raise ferry.UsageError(f"capacity_factor: {capacity_factor} with capacity {capacity}: must be positive, and the only one given")
            if dtype not in _FORMATS:
                raise ferry.UsageError(f"dtype: {dtype} is not one of {', '.join(map(str, _FORMATS))}")
            memory = "device" if torch.device(device).type == "cuda" else "host"
        self._settings = {
            "experts": experts, "top_k": top_k, "hidden": hidden, "max_tokens": max_tokens, "capacity": capacity,
            "layout": "expert_padded", "format": _FORMATS[dtype], "combine_type": _FORMATS[dtype], "own_receive_buffers": False,
            "memory": memory}
        self.top_k, self.drop_policy = top_k, drop_policy
        self.kept = None if capacity_factor is None else get_capacity(max_tokens * top_k, experts, capacity_factor)
        if self.kept is not None:
            self._settings["capacity"] = group.size * self.kept
        self.connect(group)
        local = len(self.exchange.config.placement.experts_of(self.exchange.rank))
        made = {"dtype": dtype, "device": device}
        self.router = nn.Linear(hidden, experts, bias=False, **made)
        self.w_in = nn.Parameter(torch.randn(local, hidden, ffn, **made) / hidden**0.5)
        self.w_out = nn.Parameter(torch.randn(local, ffn, hidden, **made) / ffn**0.5)

    def connect(self, group: ferry.Group | ferry.Rank) -> None:
        """Gives the layer an exchange of its own between the ranks of `group`, as many as it was made for. Collective."""
        self.exchange = ferry.Exchange(group, **self._settings)
        self._handle = handle_of(self.exchange)

    def __getstate__(self):
        return {**self.__dict__, "exchange": None, "_handle": key_of(self.exchange)}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.exchange = exchange_with(self._handle)
        self._handle = None if self.exchange is None else handle_of(self.exchange)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        if self._handle is None:
            raise ferry.UsageError("MoE: the layer was saved, and its exchange does not exist here any more: call connect(group)")
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).float().softmax(-1)
        weights, ids = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.kept is not None:
            ids = drop_routes(ids, weights, drop_policy=self.drop_policy, capacity=self.kept)
        rows = dispatch(self._handle, tokens, ids, weights)
        outputs = torch.bmm(nn.functional.silu(torch.bmm(rows.data, self.w_in)), self.w_out)
        return combine(self._handle, outputs, rows, row_weights=rows.weight).reshape(x.shape)
