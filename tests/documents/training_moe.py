# What the layer of docs/guides/training.md stands in: one rank, a thread; experts that double their rows. needs: torch
from ferry import Group


def experts(rows, row_offsets):
    return rows * 2


def body(rank):
    Group.torch = staticmethod(lambda: rank)
    # BLOCK

    import torch
    x = torch.ones(3, 2048, dtype=torch.bfloat16, requires_grad=True)
    y = moe(x, torch.arange(18).reshape(3, 6), torch.full((3, 6), 0.5))
    y.sum().backward()
    assert (y == 6).all() and (x.grad == 6).all()


Group.threads(1).run(body)
