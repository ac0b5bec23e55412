# Trains a small Mixture-of-Experts layer over several processes, and compares it with a dense layer at every step:
#   torchrun --nproc-per-node=4 examples/torchrun_moe.py
import torch
import torch.distributed as dist

import ferry
import ferry.torch

EXPERTS, TOP_K, HIDDEN, TOKENS, STEPS = 8, 2, 32, 48, 20


def scores_of(router, x):
    weights, ids = torch.softmax(x @ router, dim=1).topk(TOP_K, dim=1)
    return ids, weights


class Experts(torch.autograd.Function):
    """The received rows of each group times the matrix of its expert; padding rows stay 0."""

    @staticmethod
    def forward(ctx, rows, matrices, offsets):
        ctx.save_for_backward(rows, matrices)
        ctx.offsets = offsets
        return torch.cat([rows[b:e] @ m for b, e, m in zip(offsets, offsets[1:], matrices)])

    @staticmethod
    def backward(ctx, d_outputs):
        rows, matrices = ctx.saved_tensors
        parts = list(zip(ctx.offsets, ctx.offsets[1:], matrices))
        d_rows = torch.cat([d_outputs[b:e] @ m.T for b, e, m in parts])
        d_matrices = torch.stack([rows[b:e].T @ d_outputs[b:e] for b, e, _ in parts])
        return d_rows, d_matrices, None


def moe(exchange, router, matrices, x):
    ids, weights = scores_of(router, x)
    rows = ferry.torch.dispatch(exchange, x, ids, weights)
    offsets = rows.row_offsets.tolist()
    outputs = torch.zeros_like(rows.data)
    outputs[: offsets[-1]] = Experts.apply(rows.data[: offsets[-1]], matrices, offsets)
    return ferry.torch.combine(exchange, outputs, rows, row_weights=rows.weight)


def dense(router, matrices, x):
    ids, weights = scores_of(router, x)
    return torch.einsum("nk,nh,nkhj->nj", weights, x, matrices[ids])


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = ferry.Exchange(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS,
                              format="fp32", combine_type="fp32")
    mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)

    # All ranks draw the same parameters and the same batch; each keeps its experts and its part of the tokens.
    torch.manual_seed(0)
    router = torch.randn(HIDDEN, EXPERTS).div_(8).requires_grad_()
    all_matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN).div_(HIDDEN**0.5)
    matrices = all_matrices[mine].clone().requires_grad_()
    dense_router, dense_matrices = router.detach().clone().requires_grad_(), all_matrices.requires_grad_()
    batch, target = torch.randn(2, ranks * TOKENS, HIDDEN)
    here = slice(rank * TOKENS, (rank + 1) * TOKENS)

    optimizer = torch.optim.SGD([router, matrices], lr=0.5)
    dense_optimizer = torch.optim.SGD([dense_router, dense_matrices], lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (moe(exchange, router, matrices, batch[here]) - target[here]).square().sum() / batch.numel()
        loss.backward()
        dist.all_reduce(router.grad)  # replicated: every rank has the gradient of its own tokens

        dense_optimizer.zero_grad()
        dense_loss = (dense(dense_router, dense_matrices, batch) - target).square().sum() / batch.numel()
        dense_loss.backward()
        torch.testing.assert_close(router.grad, dense_router.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(matrices.grad, dense_matrices.grad[mine], rtol=1e-4, atol=1e-6)

        optimizer.step()
        dense_optimizer.step()
        dist.all_reduce(loss)
        if rank == 0 and step in (0, STEPS - 1):
            print(f"step {step}: loss {loss.item():.4f}, dense {dense_loss.item():.4f}, gradients agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
