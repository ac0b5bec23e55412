"""Dispatch and combine for the expert-parallel layer of FlashInfer, `flashinfer.moe_ep`.

    ferry.integrations.flashinfer.register()
    layer = MoEEpLayer(bootstrap, fleet_params, weights, backend=SplitConfig(comm="ferry", kernel=kernel))

register() adds "ferry" to FlashInfer's communication backends, beside `nvlink_one_sided` and others. Needs flashinfer-python
0.7.4 or newer and an initialised torch.distributed. docs/guides/flashinfer.md says what it does.
"""

from __future__ import annotations

import ferry

__all__ = ["register"]


def register() -> None:
    """Adds the communication backend "ferry" to FlashInfer, or replaces it. Not collective.

    A layer with this backend makes an exchange in its first forward, which is collective, as every forward is. Raises
    UnsupportedError if flashinfer.moe_ep cannot be imported or has no communication backends.
    """
    try:
        from ferry.integrations import _flashinfer_communication as communication
    except ImportError as missing:
        raise ferry.UnsupportedError(f"register: needs flashinfer-python 0.7.4 or newer: {missing}") from missing
    communication.register()
