"""deep_ep.buffers, for code that takes the classes from the modules where DeepEP V2 has them."""

from ferry.deep_ep.buffers import elastic, legacy

__all__ = ["elastic", "legacy"]
