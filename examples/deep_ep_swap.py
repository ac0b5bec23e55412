# A program for DeepEP, before and after: normal mode, as in prefill or training, and low-latency mode, as in decode.
#   torchrun --nproc-per-node=2 examples/deep_ep_swap.py             # over Ferry
#   torchrun --nproc-per-node=2 examples/deep_ep_swap.py --before    # over DeepEP, if it is installed
# The same between nodes: add --nnodes and --rdzv-endpoint.
import os
import sys

import torch
import torch.distributed as dist

if "--before" in sys.argv[1:]:
    import deep_ep
else:
    import ferry.deep_ep as deep_ep  # the only line that changes

EXPERTS, TOP_K, HIDDEN, TOKENS = 16, 4, 512, 64


def normal_mode(buffer, x, ids, weights, matrices):
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    rows, row_ids, row_weights, counts, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    # Every row has the local experts of its token, -1 for those of other ranks.
    outputs = torch.zeros(rows.shape, device=rows.device)
    for expert, matrix in enumerate(matrices):
        weight = torch.where(row_ids == expert, row_weights, 0).sum(1, keepdim=True)
        outputs += weight * (rows.float() @ matrix.float())
    y, _, _ = buffer.combine(outputs.to(x.dtype), handle)
    return y


def low_latency_mode(buffer, x, ids, weights, matrices):
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    outputs = torch.bmm(rows, matrices)  # [local experts, capacity, hidden]; rows past the counts are not used
    y, _, _ = buffer.low_latency_combine(outputs, ids, weights, handle)
    return y


def main():
    on_gpu = torch.cuda.is_available()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # On one node gloo is enough for Ferry, which has its own kernels, and it takes ranks that share a GPU.
    dist.init_process_group("nccl" if "--before" in sys.argv[1:] or torch.cuda.device_count() >= ranks else "gloo")
    configs = deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)
    rdma_bytes = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, EXPERTS),
                     *(config.get_rdma_buffer_size_hint(2 * HIDDEN, ranks) for config in configs))
    buffer = deep_ep.Buffer(dist.group.WORLD, int(1e9), rdma_bytes, low_latency_mode=True,
                            num_qps_per_rank=EXPERTS // ranks, allow_nvlink_for_low_latency_mode=True,
                            explicitly_destroy=True)

    torch.manual_seed(0)
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16) / HIDDEN**0.5
    mine = EXPERTS // ranks
    matrices = experts[rank * mine:][:mine]
    torch.manual_seed(rank + 1)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    weights, ids = torch.softmax(torch.randn(TOKENS, EXPERTS, device=device), dim=1).topk(TOP_K, dim=1)
    dense = (weights[:, :, None] * torch.einsum("nh,nkhj->nkj", x.float(), experts[ids].float())).sum(1)

    for name, mode in (("normal", normal_mode), ("low-latency", low_latency_mode)):
        y = mode(buffer, x, ids, weights, matrices)
        worst = (y.float() - dense).abs().max().reshape(1).cpu()
        dist.all_reduce(worst if not on_gpu or dist.get_backend() == "gloo" else worst.cuda(), dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{name} mode over {deep_ep.__name__} on {ranks} ranks: "
                  f"{'as a dense layer' if worst.item() < 0.1 else f'off by {worst.item()}'}")
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
