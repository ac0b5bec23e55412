"""Ferry for PyTorch: registered operators with gradients, and a small MoE layer.

    rows = ferry.torch.dispatch(exchange, x, ids, weights)
    y = ferry.torch.combine(exchange, experts(rows.data), rows, row_weights=rows.weight)

The operators `torch.ops.ferry.*` have fake kernels, so that torch.compile traces them without graph breaks; they bring
memory of their own for everything they return, so that recomputation and graphs may run them again. Router weights get
their gradient. Every operator is collective, also backward: all ranks run the same ones in the same order.
"""

from __future__ import annotations

from ferry.torch._functions import Rows, combine, dispatch
from ferry.torch._moe import MoE
from ferry.torch._registry import handle_of

__all__ = ["MoE", "Rows", "combine", "dispatch", "handle_of"]
