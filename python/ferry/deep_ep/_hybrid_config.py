"""The configuration of a HybridEPBuffer, as callers read and update it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ferry
from ferry.deep_ep._arguments import integer


@dataclasses.dataclass
class BufferConfig:
    """What a HybridEPBuffer has room for. Ferry sizes memory by it in the first call of a shape."""

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 1
    num_of_nodes: int = 1
    use_fp8: bool = False


@dataclasses.dataclass
class HybridEpConfigInstance(BufferConfig):
    """The configuration of a call, element of its handle."""

    pad_multiple: int = 1


# Numbers that tune Hybrid-EP's kernels: update_template_config() takes them, and they have no effect.
_TUNING = frozenset(
    [f"num_of_blocks_{name}" for name in ("preprocessing_api", "dispatch_api", "combine_api", "permute", "unpermute")]
    + [f"num_of_tokens_per_{name}" for name in ("chunk_preprocessing_api", "chunk_dispatch_api", "chunk_combine_api",
                                                "group_combine_api")]
    + [f"num_of_stages_{name}" for name in ("dispatch_api", "permute_block_dispatch_api", "g2s_combine_api", "s2g_combine_api")]
    + [f"num_of_{name}" for name in ("in_flight_s2g_dispatch_api", "in_flight_s2g_permute_block_dispatch_api",
                                     "additional_in_flight_s2g_dispatch_api", "additional_in_flight_s2g_combine_api",
                                     "threads_per_block_preprocessing_api")]
    + ["forward_dispatch_api", "backward_combine_api", "device_side_sync_dispatch_api", "device_side_sync_combine_api"])


class Configurer:
    """Holds the BufferConfig of a HybridEPBuffer, and makes the configurations of its calls."""

    def __init__(self, buffer_config: BufferConfig):
        self.buffer_config = buffer_config

    def get_default_config(self, fuse_permute_dispatch: bool = False) -> HybridEpConfigInstance:
        return HybridEpConfigInstance(**dataclasses.asdict(self.buffer_config))

    def updated(self, tuning: dict[str, Any], **changes: Any) -> HybridEpConfigInstance:
        """The configuration with those `changes` that are not None. More tokens raise what the buffer has room for."""
        for name in tuning.keys() - _TUNING:
            raise ferry.UsageError(f"update_template_config: there is no {name}")
        config = self.get_default_config()
        for name, value in changes.items():
            if value is not None:
                setattr(config, name, bool(value) if name == "use_fp8" else integer(name, value))
        for name, value in tuning.items():
            setattr(config, name, value)
        config.pad_multiple = max(1, config.pad_multiple)
        room = self.buffer_config.max_num_of_tokens_per_rank
        config.max_num_of_tokens_per_rank = max(room, -(-config.max_num_of_tokens_per_rank // 16) * 16)
        self.buffer_config.max_num_of_tokens_per_rank = config.max_num_of_tokens_per_rank
        return config
