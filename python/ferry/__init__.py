"""Ferry carries tokens to their experts and back: dispatch and combine for Mixture-of-Experts.

    import ferry
    exchange = ferry.Exchange(ferry.Group.torch(), experts=256, top_k=8, hidden=7168, max_tokens=128)
    rows = exchange.dispatch(x, ids, weights)
    y = exchange.combine(experts(rows), rows.plan, row_weights=rows.weight)

Arrays of NumPy (with ml_dtypes), PyTorch and CuPy go in, and the same come out. `ferry.torch` has operators with
gradients, `ferry.deep_ep` the interface of DeepEP.
"""

from ferry._core import (
    MAX_PARTS,
    MAX_TOP_K,
    DispatchResult,
    ReceiveBuffers,
    Config,
    Exchange,
    Group,
    LoadStatistics,
    Placement,
    Plan,
    Rank,
    Sizes,
    Trace,
    __version__,
    capacity_of,
    has_cuda,
    load_statistics,
    open_trace,
    plan_bytes,
    rank_counts,
    size_of,
)
from ferry._counts import LoadCounts, WireCounts
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
    "DispatchResult",
    "ReceiveBuffers",
    "BadIdError",
    "BadSourceError",
    "Config",
    "Error",
    "Exchange",
    "Group",
    "LoadCounts",
    "LoadStatistics",
    "OverflowError",
    "PeerLostError",
    "Placement",
    "Plan",
    "Rank",
    "Sizes",
    "SystemError",
    "TimeoutError",
    "Trace",
    "UnsupportedError",
    "UsageError",
    "WireCounts",
    "__version__",
    "capacity_of",
    "has_cuda",
    "load_statistics",
    "open_trace",
    "plan_bytes",
    "rank_counts",
    "size_of",
]
