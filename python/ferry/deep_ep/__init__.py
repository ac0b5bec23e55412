"""The interfaces of `deep_ep`, implemented by Ferry: Buffer, ElasticBuffer and HybridEPBuffer, on one node and between nodes.

    import ferry.deep_ep as deep_ep          # or, for code whose `import deep_ep` cannot change:
    ferry.deep_ep.install()

docs/guides/deep_ep.md lists the differences. In short: row order is fixed; any number of ranks, hidden size and top-k
works; waits end with Ferry's errors; `use_logfmt` is accepted, but rows are sent as bf16, which is more precise; shrinking
and masks raise ferry.UnsupportedError. A buffer takes a process group of torch.distributed, a ferry.Group or a
ferry.Rank, and tensors or NumPy arrays.
"""

from __future__ import annotations

import importlib.util

from ferry import __version__
from ferry.deep_ep import buffer, buffers, hybrid_ep_buffer, utils
from ferry.deep_ep._buffer import Buffer
from ferry.deep_ep._config import Config
from ferry.deep_ep._elastic import ElasticBuffer
from ferry.deep_ep._elastic_handle import EPHandle
from ferry.deep_ep._hybrid import HybridEPBuffer
from ferry.deep_ep._hybrid_config import HybridEpConfigInstance
from ferry.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer",
           "HybridEpConfigInstance", "__version__", "buffer", "buffers", "hybrid_ep_buffer", "install", "utils"]
if importlib.util.find_spec("torch") is not None:
    __all__ += ["topk_idx_t"]


def __getattr__(name: str):
    if name == "topk_idx_t":
        try:
            import torch
        except ModuleNotFoundError as missing:
            raise AttributeError(f"module {__name__!r} has no attribute 'topk_idx_t' without PyTorch") from missing
        return torch.int64
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Makes `import deep_ep`, its modules, `deep_ep_cpp` and `hybrid_ep_cpp` import this package, each class once."""
    import sys

    import ferry.deep_ep._cpp
    import ferry.deep_ep._hybrid_cpp

    sys.modules["deep_ep_cpp"] = ferry.deep_ep._cpp
    sys.modules["hybrid_ep_cpp"] = ferry.deep_ep._hybrid_cpp
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(__name__ + "."):
            sys.modules[name.removeprefix("ferry.")] = module
