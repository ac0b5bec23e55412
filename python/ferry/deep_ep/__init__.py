"""The interface of `deep_ep`, normal and low-latency mode, on one node and between nodes, implemented by Ferry.

    import ferry.deep_ep as deep_ep          # or, for code whose `import deep_ep` cannot change:
    ferry.deep_ep.install()

docs/guides/deep_ep.md lists the differences. In short: row order is fixed; any number of ranks, hidden size and top-k
works; waits end with Ferry's errors; `use_logfmt` is accepted, but rows are sent as bf16, which is more precise; shrinking
and masks raise ferry.UnsupportedError. A Buffer takes a process group of torch.distributed, a ferry.Group or a
ferry.Rank, and tensors or NumPy arrays.
"""

from __future__ import annotations

import importlib.util

from ferry import __version__
from ferry.deep_ep import buffer, utils
from ferry.deep_ep._buffer import Buffer
from ferry.deep_ep._config import Config
from ferry.deep_ep._elastic import ElasticBuffer
from ferry.deep_ep._elastic_handle import EPHandle
from ferry.deep_ep.utils import EventHandle, EventOverlap
from ferry.error import UnsupportedError

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "__version__", "buffer", "install", "utils"]
if importlib.util.find_spec("torch") is not None:
    __all__ += ["topk_idx_t"]


# Names that later versions of DeepEP have and this package lacks.
_OTHER_INTERFACES = {
    "HybridEPBuffer": "the interface of DeepEP's branch Hybrid-EP",
}


class MissingInterfaceError(UnsupportedError, AttributeError):
    """A class of another version of DeepEP. An AttributeError, so that `hasattr(deep_ep, ...)` says that it is missing."""


def __getattr__(name: str):
    if name in _OTHER_INTERFACES:
        raise MissingInterfaceError(
            f"{__name__}.{name}: Ferry has the interfaces of DeepEP V1 and V2, deep_ep.Buffer and deep_ep.ElasticBuffer, and not "
            f"{name}, {_OTHER_INTERFACES[name]}: choose a backend of these where the caller lets you, or call ferry.Exchange")
    if name == "topk_idx_t":
        try:
            import torch
        except ModuleNotFoundError as missing:
            raise AttributeError(f"module {__name__!r} has no attribute 'topk_idx_t' without PyTorch") from missing
        return torch.int64
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Makes `import deep_ep`, `deep_ep.buffer`, `deep_ep.utils` and `deep_ep_cpp` import this package, each class once."""
    import sys

    import ferry.deep_ep._cpp

    sys.modules["deep_ep_cpp"] = ferry.deep_ep._cpp
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(__name__ + "."):
            sys.modules[name.removeprefix("ferry.")] = module
