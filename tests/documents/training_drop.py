# What the capacity of docs/guides/training.md stands in: one rank, a thread; more routes than experts have room for. needs: torch
import torch

import ferry
import ferry.torch


def body(rank):
    tokens, top_k, experts, ranks = 8, 2, 4, 1
    ids, weights = torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
    # BLOCK
    assert capacity == 5 and (ids >= 0).sum(0).tolist() == [5, 5]
    exchange = ferry.Exchange(rank, experts=experts, top_k=top_k, hidden=16, max_tokens=tokens, layout="expert_padded",
                              capacity=ranks * capacity)
    rows = ferry.torch.dispatch(exchange, torch.ones(8, 16, dtype=torch.bfloat16), ids, weights)
    assert rows.data.shape == (4, 5, 16) and rows.counts.tolist() == [5, 5, 0, 0]


ferry.Group.threads(1).run(body)
