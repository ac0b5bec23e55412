"""Ferry for PyTorch: registered operators with gradients, and a small MoE layer.

    rows = ferry.torch.dispatch(exchange, x, ids, weights)
    y = ferry.torch.combine(exchange, experts(rows.data), rows, row_weights=rows.weight)

The operators `torch.ops.ferry.*` have fake kernels, so torch.compile traces them without graph breaks. They return new
tensors for everything, so recomputation and CUDA graphs may run them again. Router weights get their gradient.
Collective, in forward and backward: all ranks run the same operators in the same order.
"""

from __future__ import annotations

from ferry.torch._dropping import drop_routes, get_capacity
from ferry.torch._functions import DispatchResult, combine, dispatch
from ferry.torch._moe import MoE
from ferry.torch._registry import handle_of

__all__ = ["DispatchResult", "MoE", "combine", "dispatch", "drop_routes", "get_capacity", "handle_of"]
