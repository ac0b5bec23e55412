"""Config, and the sizes and configurations that callers query before they make a Buffer."""

from __future__ import annotations

import dataclasses

import ferry


@dataclasses.dataclass
class Config:
    """Tuning of a call. Ferry uses only `num_sms`, as its sm_limit; it sizes buffers by the calls' shapes."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP's receive queues: a valid num_nvl_bytes, which Ferry does not use."""
        return self.num_sms // 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, because all ranks are on one node."""
        return 0


def dispatch_config(num_sms: int) -> Config:
    return Config(num_sms, 6, 256, 6, 128)


def combine_config(num_sms: int) -> Config:
    return Config(num_sms, 4, 256, 6, 128)


HINT_TOP_K = 8  # the interface does not pass top-k


def low_latency_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    config = ferry.Config(**low_latency_settings(num_max_dispatch_tokens_per_rank, hidden, num_experts,
                                                 min(HINT_TOP_K, num_experts)))
    return ferry.size_of(config, num_ranks).total


def low_latency_settings(max_tokens: int, hidden: int, experts: int, top_k: int) -> dict:
    # "exact" needs the most staging, so that calls may use "partial" too.
    return _settings("expert_padded", max_tokens, hidden, experts, top_k) | {"reduction": "exact"}


def normal_settings(max_tokens: int, hidden: int, experts: int, top_k: int) -> dict:
    return _settings("rank_major", max_tokens, hidden, experts, top_k)


def _settings(layout: str, max_tokens: int, hidden: int, experts: int, top_k: int) -> dict:
    return {
        "experts": experts,
        "top_k": top_k,
        "hidden": hidden,
        "max_tokens": max_tokens,
        "layout": layout,
        "own_receive_buffers": False,
    }
