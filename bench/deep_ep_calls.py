"""Times ferry.deep_ep on GPUs, one process of torch.distributed per GPU: hidden 7168, top 8 of 256 experts, uniform routing.

Low-latency mode: 128 tokens, dispatch fp8, combine bf16, and both as a pair. Normal mode: 4,096 tokens, 24 SMs, calls with
a handle (a cached plan), and a dispatch of new routes, which reads counts on the host.

Device time between two events: median over 50 samples of the slowest rank. Graphs hold twenty calls, and each timed replay
follows an untimed one, which synchronises the ranks. A dispatch of new routes cannot be captured: it is timed one by one,
from its start on an idle stream to its end, host time included.
"""

import argparse
import json
import statistics
import tempfile

import ferry

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
DECODE_TOKENS, PREFILL_TOKENS, SMS = 128, 4096, 24
SAMPLES, CALLS = 50, 20


def time_us(call):
    """Microseconds between an event before `call` on the current stream and one after it."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def in_graph(call):
    """Times of one call inside a captured graph."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(SAMPLES):
        graph.replay()
        times.append(time_us(graph.replay) / CALLS)
    meet()  # before the graph and its memory are freed
    return times


def one_by_one(call):
    times = []
    for _ in range(SAMPLES + 1):
        meet()
        times.append(time_us(call))
    return times[1:]


def meet():
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def inputs(tokens):
    import torch

    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices
    return x, ids, torch.rand(tokens, TOP_K, device="cuda")


def in_fp8(x):
    """(values, scales), with one scale per 128 columns."""
    import torch

    blocks = x.float().unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2).clamp(min=1e-4) / 448
    return (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def low_latency(buffer):
    import torch

    x, ids, weights = inputs(DECODE_TOKENS)
    result = torch.empty_like(x)

    def dispatch():
        return buffer.low_latency_dispatch(x, ids, DECODE_TOKENS, EXPERTS, use_fp8=True)

    def combine():
        buffer.low_latency_combine(outputs, ids, weights, handle, out=result)

    def pair():
        buffer.low_latency_combine(outputs, ids, weights, dispatch()[2], out=result)

    recv, _, handle, _, _ = dispatch()
    outputs = torch.zeros(recv[0].shape, dtype=torch.bfloat16, device="cuda")  # stands for the experts' output
    works = (("dispatch fp8", dispatch), ("combine bf16", combine), ("dispatch fp8 + combine bf16", pair))
    return {("low latency", name): in_graph(work) for name, work in works}


def normal(buffer):
    import ferry.deep_ep as deep_ep

    x, ids, weights = inputs(PREFILL_TOKENS)
    x_fp8 = in_fp8(x)
    config = deep_ep.Config(SMS, 8, 256)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    new = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
           "topk_idx": ids, "topk_weights": weights, "config": config}
    rows, _, _, _, handle, _ = buffer.dispatch(x, **new)
    in_graphs = {
        "dispatch bf16, cached": lambda: buffer.dispatch(x, handle=handle, config=config),
        "dispatch fp8, cached": lambda: buffer.dispatch(x_fp8, handle=handle, config=config),
        "combine bf16": lambda: buffer.combine(rows, handle, config=config),
    }
    one_at_a_time = {
        "dispatch bf16, new routes": lambda: buffer.dispatch(x, **new),
        "dispatch fp8, new routes": lambda: buffer.dispatch(x_fp8, **new),
    }
    # First, because an exchange that was captured reports totals to the host more slowly.
    times = {("normal", name): one_by_one(work) for name, work in one_at_a_time.items()}
    return times | {("normal", name): in_graph(work) for name, work in in_graphs.items()}


def as_rank(rank, ranks, rendezvous, results):
    import torch
    import torch.distributed as dist

    import ferry.deep_ep as deep_ep

    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    times = low_latency(buffer) | normal(buffer)
    meet()
    buffer.destroy()
    results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks):
    import torch.multiprocessing

    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(as_rank, (ranks, f"{folder}/meet", results), nprocs=ranks)
    times_of_ranks = [results.get() for _ in range(ranks)]
    rows = []
    for mode, work in times_of_ranks[0]:
        slowest = sorted(max(times) for times in zip(*(rank[mode, work] for rank in times_of_ranks)))
        rows.append({
            "mode": mode,
            "work": work,
            "tokens": DECODE_TOKENS if mode == "low latency" else PREFILL_TOKENS,
            "sm_limit": SMS if mode == "normal" else 0,
            "launch": "eager" if "new routes" in work else "graph",
            "p50_us": statistics.median(slowest),
            "least_us": slowest[0],
            "most_us": slowest[-1],
        })
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the times to this file")
    given = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count() if ferry.has_cuda() else 0
    if not gpus:
        raise SystemExit("timing ferry.deep_ep needs a GPU and a build of Ferry with CUDA")
    rows = measure(gpus)
    print(f"{'mode':12} {'work':28} {'tokens':>6} {'SMs':>4} {'launch':7} {'p50':>9} {'least':>9} {'most':>9}   us, {gpus} rank(s)")
    for row in rows:
        print(f"{row['mode']:12} {row['work']:28} {row['tokens']:6} {row['sm_limit'] or 'all':>4} {row['launch']:7} "
              f"{row['p50_us']:9.1f} {row['least_us']:9.1f} {row['most_us']:9.1f}")
    if given.json:
        setting = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "router": "uniform", "ranks": gpus}
        with open(given.json, "w") as file:
            json.dump({"schema": "ferry.bench.deep_ep", "schema_version": 1} | setting | {"rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
