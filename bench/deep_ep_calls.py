"""Times ferry.deep_ep on GPUs, one process of torch.distributed for each: hidden 7168, top-8 of 256 experts, uniform.

Low-latency mode: 128 tokens; dispatch in fp8, combine in bf16, and the pair. Normal mode: 4,096 tokens, 24 SMs; calls with a
handle (a cached plan), and a dispatch with new routes, which reads counts on the host.

Times are device times between two events: the median of 50, each of the slowest rank. Calls are captured twenty to a CUDA
graph; before each timed replay an untimed one brings the ranks together. A dispatch with new routes cannot be captured. It
is timed alone, from its start on an idle stream to its end, the host's work included.
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
    """Microseconds of `call` on the current stream, between an event before it and one after it."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def graph_times_us(call):
    """Times of one captured call, in microseconds."""
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
    synchronize_ranks()  # before the graph and its memory are freed
    return times


def eager_times_us(call):
    """Times of one eager call, in microseconds."""
    times = []
    for _ in range(SAMPLES + 1):
        synchronize_ranks()
        times.append(time_us(call))
    return times[1:]


def synchronize_ranks():
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


def to_fp8(x):
    """Quantises to (values, scales), a scale for 128 columns."""
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
    outputs = torch.zeros(recv[0].shape, dtype=torch.bfloat16, device="cuda")  # stands for the experts' outputs
    calls = (("dispatch fp8", dispatch), ("combine bf16", combine), ("dispatch fp8 + combine bf16", pair))
    return {("low latency", name): graph_times_us(call) for name, call in calls}


def normal(buffer):
    import ferry.deep_ep as deep_ep

    x, ids, weights = inputs(PREFILL_TOKENS)
    x_fp8 = to_fp8(x)
    config = deep_ep.Config(SMS, 8, 256)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    routes = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
              "topk_idx": ids, "topk_weights": weights, "config": config}
    rows, _, _, _, handle, _ = buffer.dispatch(x, **routes)
    captured = {
        "dispatch bf16, cached": lambda: buffer.dispatch(x, handle=handle, config=config),
        "dispatch fp8, cached": lambda: buffer.dispatch(x_fp8, handle=handle, config=config),
        "combine bf16": lambda: buffer.combine(rows, handle, config=config),
    }
    eager = {
        "dispatch bf16, new routes": lambda: buffer.dispatch(x, **routes),
        "dispatch fp8, new routes": lambda: buffer.dispatch(x_fp8, **routes),
    }
    # Time new routes first: once calls of an exchange were captured, the host learns its totals in a slower way.
    times = {("normal", name): eager_times_us(call) for name, call in eager.items()}
    return times | {("normal", name): graph_times_us(call) for name, call in captured.items()}


def run_rank(rank, ranks, init_file, results):
    import torch
    import torch.distributed as dist

    import ferry.deep_ep as deep_ep

    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group("nccl", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    times = low_latency(buffer) | normal(buffer)
    synchronize_ranks()
    buffer.destroy()
    results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks):
    import torch.multiprocessing

    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (ranks, f"{folder}/meet", results), nprocs=ranks)
    times_of_ranks = [results.get() for _ in range(ranks)]
    rows = []
    for mode, work in times_of_ranks[0]:
        slowest = sorted(max(times) for times in zip(*(of_rank[mode, work] for of_rank in times_of_ranks)))
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
    arguments = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count() if ferry.has_cuda() else 0
    if not gpus:
        raise SystemExit("ferry.deep_ep is timed on GPUs only: this machine has none, or Ferry was built without CUDA")
    rows = measure(gpus)
    print(f"{'mode':12} {'work':28} {'tokens':>6} {'SMs':>4} {'launch':7} {'p50':>9} {'least':>9} {'most':>9}   us, {gpus} rank(s)")
    for row in rows:
        print(f"{row['mode']:12} {row['work']:28} {row['tokens']:6} {row['sm_limit'] or 'all':>4} {row['launch']:7} "
              f"{row['p50_us']:9.1f} {row['least_us']:9.1f} {row['most_us']:9.1f}")
    if arguments.json:
        setting = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "router": "uniform", "ranks": gpus}
        with open(arguments.json, "w") as file:
            json.dump({"schema": "ferry.bench.deep_ep", "schema_version": 1} | setting | {"rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
