"""Experts in slices with tensors, one process for each rank; on GPUs with the backend cuda."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np

import ferry
from torch_processes import RANKS, run, tensor

EXPERTS, TOP_K, HIDDEN, MOST = 6, 2, 16, 5


def inputs_of(device, tokens):
    random = np.random.default_rng(tokens)
    ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    x = random.integers(-8, 9, (tokens, HIDDEN)).astype(np.float32)
    return tensor(x, device), tensor(ids, device), torch.full(ids.shape, 0.5, device=device)


def check_slices(rank, device, rng):
    """All ranks are one sub-group: every one of them has all rows, and 1 / RANKS of each expert's output."""
    exchange = ferry.Exchange(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, format="fp32",
                              combine_type="fp32", placement=ferry.Placement.ep_tp(EXPERTS, 1, RANKS),
                              backend="cuda" if device.type == "cuda" else "cpu")
    for tokens in (5, 1, 3):
        x, ids, weights = inputs_of(device, tokens)
        rows = exchange.dispatch(x, ids, weights)
        order = [(token, slot) for expert in range(EXPERTS) for token in range(tokens) for slot in range(TOP_K)
                 if ids[token, slot] == expert]
        assert rows.counts.tolist() == [int((ids == expert).sum()) for expert in range(EXPERTS)]
        received = rows.received_rows()
        assert received.device == device and torch.equal(received, x[[token for token, _ in order]])
        experts = torch.tensor([float(ids[token, slot] + 1) for token, slot in order], device=device)
        y = exchange.combine(received * experts[:, None] / RANKS, rows.plan, row_weights=rows.weight)
        expected = (x[:, None] * (ids + 1)[..., None] * weights[..., None]).sum(1)
        assert torch.allclose(y, expected, rtol=1e-5)
    x, ids, weights = inputs_of(device, 3 if rank == 1 else 4)
    with pytest.raises(ferry.UsageError, match="3 tokens on rank 1, 4 on rank 0"):
        exchange.dispatch(x, ids, weights)
        exchange.synchronize()


def test_every_rank_of_a_sub_group_has_all_rows(rng):
    run(check_slices, rng)
