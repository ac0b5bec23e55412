"""Times ferry.deep_ep.Buffer between two simulated hosts beside ferry.Exchange over nvshmem, in one run: 4,096 tokens of hidden 7168,
top-8 of 256 experts, uniform, bf16, 24 SMs. A process for each GPU; a dispatch of Buffer should take at most 1.1 of Exchange's.

whole   mean of calls that follow each other without a pause, with their work on the GPU
graph   time of the GPU in a CUDA graph of twenty calls; calls that read counts on the host cannot be captured

Times are the slowest rank's, in microseconds. Needs at least two GPUs, FERRY_NVSHMEM_MODULE and NVSHMEM_REMOTE_TRANSPORT=none.
"""

import argparse
import json
import os
import tempfile

import ferry
from deep_ep_calls import EXPERTS, HIDDEN, PREFILL_TOKENS, SMS, TOP_K, Gpu, eager_times_us, graph_time_us, inputs

TARGET = 1.1
TIMES = ("whole_us", "graph_us")


def receive_buffers(exchange, rows):
    """New memory for a dispatch, as Buffer makes it for each call."""
    import torch

    def empty(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    return ferry.ReceiveBuffers(
        empty((rows, HIDDEN), torch.bfloat16), weight=empty((rows, TOP_K), torch.float32), local_ids=empty((rows, TOP_K), torch.int32),
        plan=empty((exchange.plan_bytes,), torch.uint8), rows=rows)


def exchange_of(buffer):
    return ferry.Exchange(
        buffer.runtime, backend="nvshmem", hops="two", layout="rank_major", experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN,
        max_tokens=PREFILL_TOKENS, own_receive_buffers=False)


def pairs_of_calls(buffer, exchange):
    """{name: (the call of Buffer, that of Exchange, whether they read counts)}"""
    import torch

    import ferry.deep_ep as deep_ep

    x, ids, weights = inputs(PREFILL_TOKENS, "cuda")
    config = deep_ep.Config(SMS, 8, 256, 16, 128)
    worst = buffer.group_size * PREFILL_TOKENS

    def dispatch(**settings):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        return buffer.dispatch(x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
                               num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=weights, config=config, **settings)

    rows, *_, handle, _ = dispatch()
    assert (handle.exchange.config.backend, handle.exchange.config.hops) == ("nvshmem", "two")
    room, worst_room = receive_buffers(exchange, worst), receive_buffers(exchange, worst)
    received = exchange.dispatch(x, ids, weights, memory=room, sm_limit=SMS)
    result = torch.empty_like(x)

    def dispatch_counted():
        total = exchange.dispatch_counts(ids)[0]
        exchange.dispatch(x, ids, weights, memory=receive_buffers(exchange, total), sm_limit=SMS)

    # Times new routes first: once calls of an exchange were captured, the host learns its totals in a slower way.
    return {
        "dispatch": (dispatch, dispatch_counted, True),
        "dispatch, num_worst_tokens": (lambda: dispatch(num_worst_tokens=worst),
                                       lambda: exchange.dispatch(x, ids, weights, memory=worst_room, sm_limit=SMS), False),
        "dispatch, handle": (lambda: buffer.dispatch(x, handle=handle, config=config),
                             lambda: exchange.dispatch(x, received.plan, memory=room, sm_limit=SMS), False),
        "combine": (lambda: buffer.combine(rows, handle, config=config),
                    lambda: exchange.combine(received.data, received.plan, result=result, sm_limit=SMS), False),
    }


def measure(call, reads_counts):
    device = Gpu()
    times = {"whole_us": eager_times_us(call, device, reads_counts)["whole_filled_us"], "graph_us": None}
    if not reads_counts:
        times["graph_us"] = graph_time_us(call, device)
    return times


def run_rank(rank, ranks, init_file, results):
    import torch
    import torch.distributed as dist

    import ferry.deep_ep as deep_ep

    os.environ |= {"FERRY_HOST_ID": f"host {2 * rank // ranks}", "FERRY_DEEP_EP_BACKEND": "nvshmem"}
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group("nccl", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=int(4e9), explicitly_destroy=True)
    exchange, rows = exchange_of(buffer), []
    for name, (of_buffer, of_exchange, reads_counts) in pairs_of_calls(buffer, exchange).items():
        for interface, call in (("Buffer", of_buffer), ("Exchange", of_exchange)):
            rows.append({"call": name, "interface": interface} | measure(call, reads_counts))
    exchange.destroy()
    buffer.destroy()
    results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def slowest(rows_of_ranks):
    """The largest of each time."""
    first = rows_of_ranks[0]
    return first | {time: max(row[time] for row in rows_of_ranks) for time in TIMES if first[time] is not None}


def summary_of(rows):
    """[{call, times of both interfaces, ratios, whether they are within the target}]"""
    lines = []
    for of_buffer, of_exchange in zip(rows[::2], rows[1::2]):
        line = {"call": of_buffer["call"], "target": TARGET}
        for time in TIMES:
            if of_buffer[time] is not None:
                line[time] = {"buffer": of_buffer[time], "exchange": of_exchange[time], "ratio": of_buffer[time] / of_exchange[time]}
        lines.append(line | {"met": all(line[time]["ratio"] <= TARGET for time in TIMES if time in line)})
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the times to this file")
    arguments = parser.parse_args()
    import torch.multiprocessing

    ranks = torch.cuda.device_count()
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (ranks, f"{folder}/meet", results), nprocs=ranks)
    summary = summary_of([slowest(rows) for rows in zip(*(results.get() for _ in range(ranks)))])
    print(f"{ranks} ranks on two simulated hosts, {PREFILL_TOKENS} tokens, us")
    for line in summary:
        for time in TIMES:
            if time in line:
                of = line[time]
                print(f"{line['call']:28} {time[:5]}  Buffer {of['buffer']:8.1f}  Exchange {of['exchange']:8.1f}  ratio {of['ratio']:.2f}")
        print(f"{line['call']:28} target {TARGET}: {'met' if line['met'] else 'missed'}")
    if arguments.json:
        setting = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "tokens": PREFILL_TOKENS, "router": "uniform", "ranks": ranks, "sm_limit": SMS}
        with open(arguments.json, "w") as file:
            json.dump({"schema": "ferry.bench.deep_ep_nodes", "schema_version": 1} | setting | {"summary": summary}, file, indent=2)


if __name__ == "__main__":
    main()
