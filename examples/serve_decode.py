# Decode steps of an inference server: a Mixture-of-Experts layer captured once in a CUDA graph, replayed with another
# number of tokens in every step, and compared with a dense layer:
#   torchrun --nproc-per-node=2 examples/serve_decode.py
# Without a GPU the same steps run on the CPU, without a graph.
import os

import torch
import torch.distributed as dist

import ferry

EXPERTS, TOP_K, HIDDEN, MOST_TOKENS, STEPS = 16, 4, 512, 32, 20


class Layer:
    """The layer of one rank. The arrays x, ids, weights and count keep their addresses: a graph reads them there."""

    def __init__(self, group, device):
        on_gpu = device.type == "cuda"
        self.exchange = ferry.Exchange(group, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST_TOKENS,
                                       layout="expert_padded", backend="cuda" if on_gpu else "cpu")
        torch.manual_seed(0)  # every rank draws all experts and keeps its own
        self.router = torch.randn(HIDDEN, EXPERTS, device=device)
        self.all_experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16) / HIDDEN**0.5
        mine = EXPERTS // dist.get_world_size()
        self.experts = self.all_experts[dist.get_rank() * mine:][:mine]
        self.x = torch.zeros(MOST_TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
        self.ids = torch.zeros(MOST_TOKENS, TOP_K, device=device, dtype=torch.int64)
        self.weights = torch.zeros(MOST_TOKENS, TOP_K, device=device)
        self.count = torch.zeros(1, device=device, dtype=torch.int32)

    def load(self, x):
        """The tokens of a step, and their routes."""
        weights, ids = torch.softmax(x.float() @ self.router, dim=1).topk(TOP_K, dim=1)
        self.x[: len(x)], self.ids[: len(x)], self.weights[: len(x)] = x, ids, weights
        self.count.fill_(len(x))

    def run(self, tokens=None):
        """On GPUs `count` says how many tokens there are; on CPUs `tokens` does."""
        if tokens is None:
            rows = self.exchange.dispatch(self.x, self.ids, self.weights, count=self.count)
        else:
            rows = self.exchange.dispatch(self.x[:tokens], self.ids[:tokens], self.weights[:tokens])
        outputs = torch.bmm(rows.data, self.experts)  # [local experts, capacity, hidden]; rows past the counts are not used
        return self.exchange.combine(outputs, rows.plan, row_weights=rows.weight)

    def dense(self, tokens):
        """What the layer should give, in fp32."""
        each = torch.einsum("nh,nkhj->nkj", self.x[:tokens].float(), self.all_experts[self.ids[:tokens]].float())
        return (self.weights[:tokens, :, None] * each).sum(1)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    layer = Layer(ferry.Group.torch(), device)

    graph, y = None, None
    if device.type == "cuda":
        layer.run()  # before the capture: the first call imports what it needs
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer.run()
        dist.barrier()

    random = torch.Generator().manual_seed(rank)
    worst, total = 0.0, 0
    for _ in range(STEPS):
        tokens = int(torch.randint(0, MOST_TOKENS + 1, (), generator=random))  # ranks may have none
        layer.load(torch.randn(tokens, HIDDEN, generator=random).to(device, torch.bfloat16))
        if graph is None:
            y = layer.run(tokens)
        else:
            graph.replay()
        if tokens:
            worst = max(worst, float((y[:tokens].float() - layer.dense(tokens)).abs().max()))
        total += tokens
    layer.exchange.check()  # errors that GPUs find during replays, such as bad ids
    counts = torch.tensor([total, 0 if worst < 0.1 else 1])
    dist.all_reduce(counts)
    if rank == 0:
        how = "one CUDA graph" if graph else "no GPU, so no graph"
        right = "as a dense layer" if counts[1] == 0 else f"wrong on {counts[1]} of {ranks} ranks"
        print(f"{STEPS} steps on {ranks} ranks, {counts[0]} tokens, {how}: {right}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
