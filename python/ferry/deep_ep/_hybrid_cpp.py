"""The names that callers import from hybrid_ep_cpp, the compiled module of Hybrid-EP."""

from ferry.deep_ep._hybrid_config import BufferConfig, Configurer, HybridEpConfigInstance

__all__ = ["BufferConfig", "Configurer", "HybridEpConfigInstance"]
