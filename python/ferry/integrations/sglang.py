"""Ferry under SGLang's DeepEP backends, as a plug-in of SGLang: no package named deep_ep is installed or removed.

    SGLANG_PLUGINS=ferry python -m sglang.launch_server --model-path MODEL --tp 8 --ep 8 --moe-a2a-backend deepep

SGLang calls register(), Ferry's entry point in its group sglang.srt.plugins, in each of its processes. SGLang's list of backends
is closed, so the plug-in adds none: SGLang's own dispatchers for DeepEP and DeepEP V2 get the classes of ferry.deep_ep. Needs
SGLang 0.5.23 or newer. docs/guides/engines.md says which lines decide.
"""

from __future__ import annotations

import os
import sys

import ferry

__all__ = ["register"]

_DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher."
_NAMES = {"deepep": ("Buffer", "Config"), "deepep_v2": ("ElasticBuffer",)}
"""What SGLang's dispatchers import from deep_ep, by module."""


def register() -> None:
    """Gives SGLang's dispatchers the classes of ferry.deep_ep in this process, if SGLANG_PLUGINS names ferry; else does nothing.

    Not collective, idempotent. SGLang's worker processes import the dispatchers before they load plug-ins: there the classes
    are replaced by SGLang's hooks. Raises UnsupportedError if SGLang has no plug-ins, and if a dispatcher found no deep_ep at
    all when it was imported, since it leaves out more than the classes then.
    """
    if "ferry" not in (name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")):
        return
    import ferry.deep_ep

    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as missing:
        raise ferry.UnsupportedError(f"register: needs SGLang 0.5.23 or newer: {missing}") from missing
    ferry.deep_ep.install()
    for module, names in _NAMES.items():
        dispatcher = sys.modules.get(_DISPATCHERS + module)
        for name in names if dispatcher else ():  # one that is imported later imports ferry.deep_ep
            if not hasattr(dispatcher, name):
                raise ferry.UnsupportedError(f"register: {_DISPATCHERS}{module} was imported without a deep_ep: install sgl-deep-ep, which "
                                             "SGLang requires, or python/deep_ep of Ferry")
            HookRegistry.register(f"{_DISPATCHERS}{module}.{name}", getattr(ferry.deep_ep, name), HookType.REPLACE)
