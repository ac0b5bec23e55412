"""Compares the results and gradients of the PyTorch operators, called as they are and compiled, with a dense sum."""

import torch

import ferry.torch

EXPERTS_OF_RANK, TOP_K, HIDDEN, MOST = 2, 3, 64, 12


def settings_of(ranks, device):
    """Of the exchange that check_dense_sum() takes."""
    return {"experts": EXPERTS_OF_RANK * ranks, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST, "format": "fp32",
            "combine_type": "fp32", "backend": device.type}


def scaled(handle, x, ids, weights, scale):
    """Each expert multiplies its rows by its own factor. `scale`: of this rank's experts."""
    rows = ferry.torch.dispatch(handle, x, ids, weights)
    row = torch.arange(rows.data.shape[0], device=x.device)
    group = (row[:, None] >= rows.row_offsets[None, 1:-1]).sum(1)
    return ferry.torch.combine(handle, rows.data * scale[group][:, None], rows, row_weights=rows.weight)


def dense(x, ids, weights, scale):
    """`scale`: of all experts."""
    factor = scale[ids.clamp(min=0)] * weights * (ids >= 0)
    return x * factor.sum(1, keepdim=True)


def results_of(function, x, weights, dy):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = function(x, weights)
    y.backward(dy)
    return y.detach(), x.grad, weights.grad


def check_dense_sum(exchange, rank, ranks, device, seed, compiler="aot_eager"):
    """As every rank, with the same seed. Ranks have different numbers of tokens."""
    random = torch.Generator().manual_seed(seed)
    experts = EXPERTS_OF_RANK * ranks
    scale = torch.rand(experts, generator=random) + 0.5
    random.manual_seed(seed + 1 + rank)
    tokens = MOST - 5 * rank % MOST
    x, dy = (torch.randn(tokens, HIDDEN, generator=random) for _ in range(2))
    ids = torch.stack([torch.randperm(experts, generator=random)[:TOP_K] for _ in range(tokens)])
    ids[torch.rand(ids.shape, generator=random) < 0.2] = -1
    weights = torch.rand(tokens, TOP_K, generator=random)

    expected = results_of(lambda x, weights: dense(x, ids, weights, scale.double()), x.double(), weights.double(), dy.double())
    x, ids, weights, dy = (tensor.to(device) for tensor in (x, ids, weights, dy))
    mine = scale[EXPERTS_OF_RANK * rank : EXPERTS_OF_RANK * (rank + 1)].to(device)
    handle = ferry.torch.handle_of(exchange)
    for function in (scaled, torch.compile(scaled, backend=compiler, fullgraph=True)):
        got = results_of(lambda x, weights: function(handle, x, ids, weights, mine), x, weights, dy)
        exchange.synchronize()
        for name, one, other in zip(("y", "gradient of x", "gradient of weights"), got, expected):
            assert one.device.type == device.type
            assert torch.allclose(one.cpu().double(), other, rtol=1e-4, atol=1e-4), f"{name} of rank {rank}"
