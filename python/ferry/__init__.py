"""Expert-parallel communication for Mixture-of-Experts models: dispatch and combine.

    import ferry
    exchange = ferry.Exchange(ferry.Group.torch(), experts=256, top_k=8, hidden=7168, max_tokens=128)
    rows = exchange.dispatch(x, ids, weights)                               # x [N, H], ids and weights [N, K]
    y = exchange.combine(experts(rows), rows.plan, row_weights=rows.weight)  # [N, H]

Arrays may be of NumPy (with ml_dtypes), PyTorch or CuPy; results are of the same framework. `ferry.torch` has operators
with gradients, `ferry.deep_ep` the interface of DeepEP, `ferry.nvfuser` the arguments and results of nvFuser,
`ferry.max` those of MAX, `ferry.megatron` a call of Megatron-LM's inference dispatcher, `ferry.integrations` plug-ins for other
systems. `python -m ferry` prints the folder of the documents, such as docs/contract.md.
"""

from ferry._core import (
    MAX_PARTS,
    MAX_TOP_K,
    Config,
    DispatchResult,
    Exchange,
    Group,
    LoadStatistics,
    Placement,
    Plan,
    Program,
    ProgramStep,
    Rank,
    ReceiveBuffers,
    Sizes,
    Topology,
    Trace,
    __version__,
    balance,
    capacity_of,
    dispatch_layout,
    has_cuda,
    load_formats,
    load_statistics,
    moved_experts,
    open_trace,
    plan_bytes,
    rank_counts,
    size_of,
)
from ferry._counts import LoadCounts, WaitTimes, WireCounts
from ferry._evaluator import Evaluator
from ferry._metrics import MetricsCollector, metrics
from ferry.error import (
    BadIdError,
    BadSourceError,
    Error,
    OverflowError,
    PeerLostError,
    SystemError,
    TimeoutError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "MAX_PARTS",
    "MAX_TOP_K",
    "BadIdError",
    "BadSourceError",
    "Config",
    "DispatchResult",
    "Error",
    "Evaluator",
    "Exchange",
    "Group",
    "LoadCounts",
    "LoadStatistics",
    "MetricsCollector",
    "OverflowError",
    "PeerLostError",
    "Placement",
    "Plan",
    "Program",
    "ProgramStep",
    "Rank",
    "ReceiveBuffers",
    "Sizes",
    "SystemError",
    "TimeoutError",
    "Topology",
    "Trace",
    "UnsupportedError",
    "UsageError",
    "WaitTimes",
    "WireCounts",
    "__version__",
    "balance",
    "capacity_of",
    "dispatch_layout",
    "has_cuda",
    "load_formats",
    "load_statistics",
    "metrics",
    "moved_experts",
    "open_trace",
    "plan_bytes",
    "rank_counts",
    "size_of",
]
