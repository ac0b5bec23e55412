"""A small expert-parallel layer, as a starting point."""

from __future__ import annotations

import torch
from torch import nn

import ferry
from ferry.torch._functions import combine, dispatch
from ferry.torch._registry import handle_of

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class MoE(nn.Module):
    """Router, dispatch, this rank's experts (two linear maps with a SiLU between them), combine.

    Every rank holds the whole router: sum its gradients over ranks, as for any replicated parameter. Every rank holds
    its own experts, w_in [L, H, F] and w_out [L, F, H]. Collective: all ranks construct the layer and call it together.
    It cannot be copied or pickled, because its exchange belongs to this process: save its state_dict() and load that
    into another layer.
    """

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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """`capacity`: rows an expert has room for, beyond which OverflowError is raised; 0: R * max_tokens, any routing."""
        super().__init__()
        if dtype not in _FORMATS:
            raise ferry.UsageError(f"dtype: {dtype} is not one of {', '.join(map(str, _FORMATS))}")
        on_gpu = torch.device(device).type == "cuda"
        self.exchange = ferry.Exchange(
            group, experts=experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, capacity=capacity,
            layout="expert_padded", format=_FORMATS[dtype], combine_type=_FORMATS[dtype], own_receive_buffers=False,
            backend="cuda" if on_gpu else "cpu")
        self.top_k = top_k
        self._handle = handle_of(self.exchange)
        local = len(self.exchange.config.placement.experts_of(self.exchange.rank))
        made = {"dtype": dtype, "device": device}
        self.router = nn.Linear(hidden, experts, bias=False, **made)
        self.w_in = nn.Parameter(torch.randn(local, hidden, ffn, **made) / hidden**0.5)
        self.w_out = nn.Parameter(torch.randn(local, ffn, hidden, **made) / ffn**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).float().softmax(-1)
        weights, ids = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = dispatch(self._handle, tokens, ids, weights)
        outputs = torch.bmm(nn.functional.silu(torch.bmm(rows.data, self.w_in)), self.w_out)
        return combine(self._handle, outputs, rows, row_weights=rows.weight).reshape(x.shape)
