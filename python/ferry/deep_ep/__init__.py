"""The interface of `deep_ep`, normal and low-latency mode on one node, carried by Ferry.

    import ferry.deep_ep as deep_ep          # or, for code that says import deep_ep:
    ferry.deep_ep.install()

What differs is in docs/guides/deep_ep.md. In short: rows always come in the same order; any number of ranks, hidden
size and top-k goes; waits end by Ferry's errors; `use_logfmt` is accepted and sent as bf16, which is more exact;
shrinking, masks and RDMA modes raise ferry.UnsupportedError. Besides a process group of torch.distributed, a Buffer
takes a ferry.Group or ferry.Rank, and besides tensors arrays of NumPy.
"""

from __future__ import annotations

import importlib.util

from ferry.deep_ep._buffer import Buffer
from ferry.deep_ep._config import Config
from ferry.deep_ep._events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install"]
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
    """Makes `import deep_ep`, of its modules and of `deep_ep_cpp` find what is here: every class once."""
    import sys

    import ferry.deep_ep._cpp
    import ferry.deep_ep.buffer
    import ferry.deep_ep.utils

    sys.modules["deep_ep_cpp"] = ferry.deep_ep._cpp
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(__name__ + "."):
            sys.modules[name.removeprefix("ferry.")] = module
