"""The names that callers import from deep_ep_cpp, the compiled module of deep_ep."""

from ferry.deep_ep._buffer import Buffer as _Buffer
from ferry.deep_ep._config import Config
from ferry.deep_ep.utils import EventHandle

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled"]

get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled


def __getattr__(name: str):
    if name == "topk_idx_t":
        import ferry.deep_ep

        return ferry.deep_ep.topk_idx_t
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
