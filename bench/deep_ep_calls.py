"""Times calls of ferry.deep_ep on GPUs, one process of torch.distributed for each: hidden 7168, top-8 of 256 experts, uniform.

Low-latency mode: 128 tokens, dispatch in fp8, combine in bf16. Normal mode: 4,096 tokens, 24 SMs.

host    time inside the call
whole   time to the end of the call's work on the GPU
filled  calls follow each other without a pause. Host: behind work that keeps the GPU busy, so that the GPU never makes the host
        wait; whole: mean of calls in a row
idle    each call starts on an idle GPU
graph   time of the GPU in a CUDA graph of twenty calls; calls that read counts on the host cannot be captured

Every time is the slowest rank's: host and idle are medians. A dispatch of new routes waits for its counts, so its host time
includes most of the GPU's. Without a GPU: host times of one rank of the CPU backend with one token, the overhead of Python.
"""

import argparse
import json
import statistics
import tempfile
import time

import ferry
from host_profile import profile

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
DECODE_TOKENS, PREFILL_TOKENS, SMS = 128, 4096, 24
CALLS, ROUNDS = 20, 5  # calls of each round
CALLS_IN_A_ROW = 100  # so many that the first launch and the last wait do not count
BUSY_CYCLES = 40_000_000  # 20 ms of an H200: longer than the host needs for the calls of a round


class Gpu:
    """Waits and queues of a rank that has a GPU."""

    def __init__(self):
        import torch

        self.torch = torch

    def synchronize(self):
        self.torch.cuda.synchronize()

    def synchronize_ranks(self):
        self.synchronize()
        self.torch.distributed.barrier()
        self.synchronize()

    def keep_busy(self):
        self.torch.cuda._sleep(BUSY_CYCLES)


class Cpu:
    def synchronize(self):
        pass

    synchronize_ranks = keep_busy = synchronize


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def eager_times_us(call, device, reads_counts):
    """Host and whole times of an eager call, in microseconds."""
    host, host_idle, whole, whole_idle = [], [], [], []
    for _ in range(CALLS):
        call()
    for _ in range(ROUNDS):
        device.synchronize_ranks()
        if not reads_counts:
            device.keep_busy()
        host += [seconds_of(call) for _ in range(CALLS)]
        device.synchronize_ranks()
        start = time.perf_counter()
        for _ in range(CALLS_IN_A_ROW):
            call()
        device.synchronize()
        whole.append((time.perf_counter() - start) / CALLS_IN_A_ROW)
    for _ in range(CALLS):
        device.synchronize_ranks()
        start = time.perf_counter()
        host_idle.append(seconds_of(call))
        device.synchronize()
        whole_idle.append(time.perf_counter() - start)
    device.synchronize_ranks()
    return {
        "host_filled_us": statistics.median(host) * 1e6,
        "whole_filled_us": statistics.mean(whole) * 1e6,
        "host_idle_us": statistics.median(host_idle) * 1e6,
        "whole_idle_us": statistics.median(whole_idle) * 1e6,
    }


def graph_time_us(call, device):
    """Median device time of a captured call, in microseconds."""
    torch = device.torch
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(CALLS):
        graph.replay()  # brings the ranks together
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    device.synchronize_ranks()  # before the graph and its memory are freed
    return statistics.median(times)


def inputs(tokens, where):
    import torch

    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=where)
    ids = torch.rand(tokens, EXPERTS, device=where).topk(TOP_K).indices
    return x, ids, torch.rand(tokens, TOP_K, device=where)


def to_fp8(x):
    """Quantises to (values, scales), a scale for 128 columns."""
    import torch

    blocks = x.float().unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2).clamp(min=1e-4) / 448
    return (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def low_latency_calls(buffer, where, tokens):
    """{name: call}"""
    import torch

    x, ids, weights = inputs(tokens, where)
    result = torch.empty_like(x)
    stats = torch.zeros(EXPERTS // buffer.group_size, dtype=torch.int32, device=where)

    def dispatch(**settings):
        return buffer.low_latency_dispatch(
            x, ids, tokens, EXPERTS, cumulative_local_expert_recv_stats=stats, use_fp8=True, **settings)

    handle = dispatch()[2]
    rows = dispatch()[0][0].shape
    outputs = torch.zeros(rows, dtype=torch.bfloat16, device=where)  # stands for the experts' outputs

    def combine(handle=handle, **settings):
        return buffer.low_latency_combine(outputs, ids, weights, handle, out=result, **settings)

    def pair():
        combine(dispatch()[2])

    def pair_with_hooks():
        _, _, handle, _, receive = dispatch(return_recv_hook=True)
        receive()
        combine(handle, return_recv_hook=True)[2]()

    def pair_async():
        _, _, handle, event, _ = dispatch(async_finish=True)
        event.current_stream_wait()
        combine(handle, async_finish=True)[1].current_stream_wait()

    return {"dispatch fp8": dispatch, "combine bf16, out=": combine, "pair": pair, "pair with hooks": pair_with_hooks,
            "pair with async_finish": pair_async}


def normal_calls(buffer, where, tokens):
    """{name: call}"""
    import ferry.deep_ep as deep_ep

    x, ids, weights = inputs(tokens, where)
    x_fp8 = to_fp8(x)
    config = deep_ep.Config(SMS, 8, 256)

    def layout():
        return buffer.get_dispatch_layout(ids, EXPERTS)

    def dispatch_new(x):
        per_rank, _, per_expert, in_rank, _ = layout()
        return buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights, config=config)

    rows, _, _, _, handle, _ = dispatch_new(x)
    # Time new routes first: once calls of an exchange were captured, the host learns its totals in a slower way.
    return {
        "layout and dispatch bf16": lambda: dispatch_new(x),
        "layout and dispatch fp8": lambda: dispatch_new(x_fp8),
        "get_dispatch_layout": layout,
        "dispatch bf16, handle": lambda: buffer.dispatch(x, handle=handle, config=config),
        "dispatch fp8, handle": lambda: buffer.dispatch(x_fp8, handle=handle, config=config),
        "combine bf16": lambda: buffer.combine(rows, handle, config=config),
    }


def measure_rank(buffer, device, where, tokens_of_modes, with_profile):
    """[row of the table] of this rank, in the same order on every rank."""
    rows = []
    for mode, calls_of, tokens in zip(("low latency", "normal"), (low_latency_calls, normal_calls), tokens_of_modes):
        for name, call in calls_of(buffer, where, tokens).items():
            reads_counts = name.startswith("layout and")
            row = {"mode": mode, "call": name, "tokens": tokens, "sm_limit": SMS if mode == "normal" else 0}
            row |= eager_times_us(call, device, reads_counts)
            if with_profile:
                if not reads_counts:
                    device.keep_busy()
                row["parts_us"] = profile(call, CALLS, row["host_filled_us"])
                device.synchronize_ranks()
            captured = isinstance(device, Gpu) and not reads_counts and "async" not in name
            row["graph_us"] = graph_time_us(call, device) if captured else None
            rows.append(row)
    return rows


def run_gpu_rank(rank, ranks, init_file, with_profile, results):
    import torch
    import torch.distributed as dist

    import ferry.deep_ep as deep_ep

    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group("nccl", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    rows = measure_rank(buffer, Gpu(), "cuda", (DECODE_TOKENS, PREFILL_TOKENS), with_profile)
    buffer.destroy()
    results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure_on_gpus(ranks, with_profile):
    import torch.multiprocessing

    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_gpu_rank, (ranks, f"{folder}/meet", with_profile, results), nprocs=ranks)
    return [slowest(rows) for rows in zip(*(results.get() for _ in range(ranks)))]


def slowest(rows_of_ranks):
    """The largest of each time; the parts of the rank whose host time is the largest."""
    row = max(rows_of_ranks, key=lambda row: row["host_filled_us"]).copy()
    for name, value in row.items():
        if name.endswith("_us") and isinstance(value, float):
            row[name] = max(of_rank[name] for of_rank in rows_of_ranks)
    return row


def measure_on_cpu(with_profile):
    import ferry.deep_ep as deep_ep

    def body(rank):
        return measure_rank(deep_ep.Buffer(rank), Cpu(), "cpu", (1, 1), with_profile)

    return ferry.Group.threads(1).run(body)[0]


def print_table(rows):
    times = ("host_filled_us", "whole_filled_us", "host_idle_us", "whole_idle_us", "graph_us")
    print(f"{'':12} {'us':26} {'':6} {'filled':>8} {'':>8} {'idle':>8}")
    print(f"{'mode':12} {'call':26} {'tokens':>6} {'host':>8} {'whole':>8} {'host':>8} {'whole':>8} {'graph':>8}")
    for row in rows:
        values = " ".join(f"{row[time]:8.1f}" if row[time] is not None else f"{'':8}" for time in times)
        print(f"{row['mode']:12} {row['call']:26} {row['tokens']:6} {values}")


def print_parts(rows):
    for row in rows:
        host, parts = row["host_filled_us"], row["parts_us"]
        named = 1 - parts.get("rest", 0.0) / host
        listed = ", ".join(f"{part} {time:.1f}" for part, time in parts.items())
        print(f"{row['mode']}, {row['call']}: {host:.1f} us, of which named {named:.0%}: {listed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the times to this file")
    parser.add_argument("--profile", action="store_true", help="also split each call's host time into parts")
    arguments = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count() if ferry.has_cuda() else 0
    start = time.monotonic()
    rows = measure_on_gpus(gpus, arguments.profile) if gpus else measure_on_cpu(arguments.profile)
    seconds = time.monotonic() - start
    print(f"{gpus or 1} rank(s), backend {'cuda' if gpus else 'cpu'}, measured in {seconds:.0f} s")
    print_table(rows)
    if arguments.profile:
        print_parts(rows)
    if arguments.json:
        setting = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "router": "uniform", "ranks": gpus or 1,
                   "backend": "cuda" if gpus else "cpu", "seconds": seconds}
        with open(arguments.json, "w") as file:
            json.dump({"schema": "ferry.bench.deep_ep", "schema_version": 2} | setting | {"rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
