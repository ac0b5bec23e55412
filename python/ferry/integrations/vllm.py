"""Ferry under vLLM's DeepEP backends, as a plug-in of vLLM: no package named deep_ep is installed or removed.

    VLLM_PLUGINS=ferry vllm serve MODEL --data-parallel-size 8 --enable-expert-parallel --all2all-backend deepep_low_latency

vLLM calls register(), Ferry's entry point in its group vllm.general_plugins, in each of its processes before it loads a model.
vLLM's list of backends is closed, so the plug-in adds none: it makes `import deep_ep` there import ferry.deep_ep, which vLLM's
own classes for DeepEP then call. Needs vLLM with PyTorch. docs/guides/engines.md says which lines decide.
"""

from __future__ import annotations

import os
import sys

import ferry

__all__ = ["register"]


def register() -> None:
    """Makes `import deep_ep` import ferry.deep_ep in this process, if VLLM_PLUGINS names ferry; else does nothing.

    Not collective, idempotent. Raises UnsupportedError if another deep_ep has been imported before: vLLM has bound its classes.
    """
    if "ferry" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    import ferry.deep_ep

    if sys.modules.get("deep_ep", ferry.deep_ep) is not ferry.deep_ep:
        raise ferry.UnsupportedError("register: another deep_ep was imported before vLLM loaded its plug-ins: import it nowhere, or remove "
                                     "ferry from VLLM_PLUGINS")
    ferry.deep_ep.install()
