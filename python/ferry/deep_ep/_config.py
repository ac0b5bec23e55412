"""Config, and the sizes and configurations that callers query before they make a Buffer."""

from __future__ import annotations

import dataclasses

import ferry
from ferry.deep_ep._arguments import integer


@dataclasses.dataclass
class Config:
    """Tuning of a call. Ferry uses only `num_sms`, as its sm_limit; it sizes buffers by the calls' shapes.

    As in DeepEP chunks must fit their buffers twice (NVLink: once), and num_max_rdma_chunked_recv_tokens is rounded up to a
    multiple of num_max_rdma_chunked_send_tokens. Calls need an even num_sms.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self):
        for field in dataclasses.fields(self):
            least = 0 if field.name == "num_sms" else 1
            setattr(self, field.name, integer(f"Config: {field.name}", getattr(self, field.name), least))
        send, recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if send >= recv:
            raise ferry.UsageError(
                f"Config: num_max_nvl_chunked_send_tokens = {send}, must be below num_max_nvl_chunked_recv_tokens = {recv}")
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        self.num_max_rdma_chunked_recv_tokens = recv = -(-recv // send) * send
        if 2 * send > recv:
            raise ferry.UsageError(
                f"Config: num_max_rdma_chunked_send_tokens = {send}, must be at most half of num_max_rdma_chunked_recv_tokens = {recv}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP's receive queues: a valid num_nvl_bytes, which Ferry does not use."""
        hidden_bytes, num_ranks = integer("hidden_bytes", hidden_bytes), integer("num_ranks", num_ranks, 1)
        return self.num_sms // 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP's buffers between nodes: a num_rdma_bytes that calls accept. Ferry does not use them.

        As in DeepEP, nodes have 8 ranks. Up to 8 ranks, which Ferry takes on several nodes too, count as two nodes.
        """
        hidden_bytes, num_ranks = integer("hidden_bytes", hidden_bytes), integer("num_ranks", num_ranks, 1)
        return rdma_bytes(self, hidden_bytes, HINT_SCALES, HINT_SLOTS, num_ranks)


HINT_SCALES = HINT_SLOTS = 128  # the interface does not pass them


def rdma_bytes(config: Config, row_bytes: int, scales: int, slots: int, ranks: int) -> int:
    """Bytes of DeepEP's buffers between nodes for rows with `scales` float32 and `slots` ids and weights; 0 for one rank."""
    if ranks == 1:
        return 0
    row = -(-(row_bytes + 8 + 4 * scales + 8 * slots) // 16) * 16  # 8 bytes of recv_src_meta
    queues = max(1, config.num_sms // 2) * max(2, -(-ranks // NODE_RANKS)) * 2  # channels, nodes, to send and to receive
    return queues * (config.num_max_rdma_chunked_recv_tokens * row + 4 * (2 * NODE_RANKS + 4))


NODE_RANKS = 8  # of DeepEP


def dispatch_config(num_sms: int) -> Config:
    return Config(num_sms, 6, 256, 6, 128)


def combine_config(num_sms: int) -> Config:
    return Config(num_sms, 4, 256, 6, 128)


HINT_TOP_K = 8  # the interface does not pass top-k


def low_latency_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    for name, value in (("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank), ("hidden", hidden),
                        ("num_ranks", num_ranks), ("num_experts", num_experts)):
        integer(name, value, 1)
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
