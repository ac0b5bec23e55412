"""The code blocks of guides with tensors, a process for each rank: on GPUs if there are enough, on one node and as two."""

import os
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.max
import ferry.megatron
import ferry.nvfuser
from torch_processes import GPUS, RANKS, run

GUIDES = pathlib.Path(__file__).parents[3] / "docs/guides"


def run_block(guide, **names):
    """Runs the first block of a guide in Python, with these names; returns all names."""
    block = re.search(r"^```python\n(.*?)^```$", (GUIDES / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    exec(block, names)
    return names


def values(device, count=3):
    return torch.arange(count * 8.0, device=device).reshape(count, 8) + 100 * torch.distributed.get_rank()


def check_nvfuser(device):
    x = torch.arange(16.0, device=device).reshape(4, 4)
    named = run_block("nvfuser", ferry=ferry, rank=ferry.Group.torch(), x=x, topk_idx=torch.tensor([0, 2, 3, 2], device=device))
    assert torch.equal(named["y"], 2 * x)


def check_max(device):
    experts = 2 * RANKS
    exchange = ferry.max.Exchange(ferry.Group.torch(), experts=experts, top_k=2, hidden=8, max_tokens=4, format="fp32", combine_type="fp32")
    first, x, ids = 2 * torch.distributed.get_rank(), values(device), torch.tensor([[0, experts - 1], [1, -1], [-1, -1]], device=device)

    def grouped_gemm(tokens, row_offsets, expert_ids):
        rows, offsets = tokens.clone(), row_offsets.tolist()
        for expert, begin, end in zip(expert_ids.tolist(), offsets, offsets[1:]):
            rows[begin:end] *= first + expert + 1
        return rows

    weights = torch.full((3, 2), 0.5, device=device)
    y = run_block("max", exchange=exchange, x=x, topk_ids=ids, router_weights=weights, grouped_gemm=grouped_gemm)["y"]
    exchange.synchronize()
    assert torch.equal(y, x * torch.tensor([[(experts + 1) / 2], [1], [0]], device=device))


def check_megatron(device):
    rank, counts = torch.distributed.get_rank(), [3 + peer % 2 for peer in range(RANKS)]
    exchange = ferry.Exchange(ferry.Group.torch(), experts=RANKS, top_k=2, hidden=8, max_tokens=4, format="fp32", combine_type="fp32")
    x = values(device, counts[rank])
    ids = torch.tensor([[token % RANKS, (token + 1) % RANKS] for token in range(len(x))], device=device)

    def local_experts(x, ids, weights):
        return x * torch.where(ids == rank, weights, 0).sum(1, keepdim=True) * (rank + 1)

    room = 4 * RANKS
    y = run_block("megatron", ferry=ferry, exchange=exchange, x=x, ids=ids, weights=torch.full_like(ids, 0.5, dtype=torch.float32),
                  all_x=torch.empty(room, 8, device=device), all_ids=torch.empty(room, 2, dtype=ids.dtype, device=device),
                  all_weights=torch.empty(room, 2, device=device), step_metadata=torch.empty(3, dtype=torch.int32, device=device),
                  y=torch.empty_like(x), local_experts=local_experts)
    assert y["step_metadata"].tolist() == [sum(counts), sum(counts[:rank]), max(counts)]
    assert torch.equal(y["y"], x * ((ids + 1).sum(1, keepdim=True) * 0.5))


def check_blocks(rank, device, rng, nodes=1):
    os.environ["FERRY_HOST_ID"] = f"host {nodes * rank // RANKS}"
    for check in (check_nvfuser, check_max, check_megatron):
        check(device if GPUS >= RANKS else torch.device("cpu"))


def check_blocks_on_two_nodes(rank, device, rng):
    check_blocks(rank, device, rng, 2)


@pytest.mark.parametrize("check", [check_blocks, check_blocks_on_two_nodes])
def test_the_blocks_of_guides_run_on_tensors(rng, check):
    run(check, rng)
