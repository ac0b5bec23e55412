"""deep_ep.buffers.elastic: the interface of DeepEP V2."""

from ferry.deep_ep._elastic import ElasticBuffer
from ferry.deep_ep._elastic_handle import EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
