"""deep_ep.hybrid_ep_buffer, for code that takes its names from there."""

from ferry.deep_ep._hybrid import HybridEPBuffer
from ferry.deep_ep._hybrid_config import HybridEpConfigInstance
from ferry.deep_ep._hybrid_routes import indices_to_map

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]
