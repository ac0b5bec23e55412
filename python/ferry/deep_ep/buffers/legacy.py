"""deep_ep.buffers.legacy: the interface of DeepEP V1."""

from ferry.deep_ep._buffer import Buffer

__all__ = ["Buffer"]
