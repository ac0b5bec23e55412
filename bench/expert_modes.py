"""What shared experts, replicated and gathered input and step metadata cost on GPUs.

7168 columns of bf16, top-8 of 256 experts, uniform routing. A time is that of one call out of 20 in a row, on the slowest rank;
medians of 5 rounds in which the modes take turns. Ranks are threads of one process.

- Shared experts and replicated input: 4,096 tokens a rank, beside a copy of the rows that they add or keep; a rank for each GPU or
  two on a single GPU. Copies run on all ranks at the same time, as the calls do.
- Gathered input: dispatch and combine of a few tokens on eight ranks, beside the plain pair. Metadata: beside a barrier, which is an
  all-gather-v of no rows. These calls are short, so they are replayed from CUDA graphs.
"""

import argparse
import json
import statistics
import threading

import ferry
import torch

TOKENS, HIDDEN, TOP_K, EXPERTS, CALLS, ROUNDS = 4096, 7168, 8, 256, 20, 5
FEW_RANKS, FEW_TOKENS = 8, (1, 4, 16, 32)
SHAPE = dict(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, backend="cuda", deadline=8.0)


class Timer:
    """Times calls that all ranks make at the same time."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks)

    def microseconds(self, call, times=CALLS, calls=1):
        """Of a call. `call` makes `calls` of them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._barrier.wait()
        call()  # so that all ranks have begun before the clock does
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / (times * calls)


def modes_of(rank, ids, replicated_ids):
    """{mode: (dispatch, combine, copy of the rows it adds or keeps)}"""
    torch.manual_seed(rank.index)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    modes = {}
    for name, options, routes in (("plain", {}, ids), ("shared", {"shared_experts": 1}, ids),
                                  ("replicated", {"input": "replicated"}, replicated_ids)):
        exchange = ferry.Exchange(rank, **SHAPE, **options)
        received = exchange.dispatch(x, routes, weights)
        torch.cuda.synchronize()
        rank.barrier()  # memory is allocated while no rank's kernel waits for this one
        rows = int(received.total)
        outputs, plan, row_weights = received.data.clone(), received.plan.copy(), received.weight.clone()
        torch.cuda.synchronize()
        rank.barrier()
        result = exchange.combine(outputs, plan, row_weights=row_weights)
        moved = TOKENS if name == "shared" else rows
        torch.cuda.synchronize()
        rank.barrier()
        source, target = (torch.empty(moved, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        modes[name] = {
            "rows": rows,
            "dispatch": lambda e=exchange, i=routes: e.dispatch(x, i, weights),
            "combine": lambda e=exchange, o=outputs, p=plan, w=row_weights, r=result: e.combine(o, p, row_weights=w, result=r),
            "copy": lambda s=source, t=target: t.copy_(s),
        }
    return modes


def captured(rank, call):
    """A graph of CALLS calls. Ranks capture in turn: a capture waits for the device, where another rank's kernel may wait for this one."""
    torch.cuda.synchronize()
    rank.barrier()  # memory is allocated while no rank's kernel waits for this one
    call()
    torch.cuda.synchronize()
    rank.barrier()
    graph = torch.cuda.CUDAGraph()
    for index in range(rank.size):
        if rank.index == index:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                for _ in range(CALLS):
                    call()
        rank.barrier()
    return graph


def short_calls_of(rank):
    """{(call, tokens of a rank): graph}, the exchanges, and {(mode, tokens of a rank): result of the pair}"""
    torch.manual_seed(rank.index)
    most = max(FEW_TOKENS)
    x = torch.randn(most, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(most, EXPERTS, device="cuda").topk(TOP_K).indices
    weights = torch.rand(most, TOP_K, device="cuda")
    graphs, exchanges, results = {}, [], {}
    for name, options in (("plain", {}), ("gathered", {"transfer": "gather"})):
        exchange = ferry.Exchange(rank, **SHAPE | {"max_tokens": most}, **options)
        exchanges.append(exchange)
        for tokens in FEW_TOKENS:
            results[name, tokens] = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")

            def pair(e=exchange, n=tokens, y=results[name, tokens]):
                rows = e.dispatch(x[:n], ids[:n], weights[:n])
                e.combine(rows.data, rows.plan, row_weights=rows.weight, result=y)

            graphs[f"{name} dispatch and combine", tokens] = captured(rank, pair)
    out = torch.empty(1, HIDDEN, dtype=torch.bfloat16, device="cuda")
    graphs["metadata", 0] = captured(rank, lambda: exchanges[0].metadata(1))
    graphs["barrier", 0] = captured(rank, lambda: exchanges[0].all_gather_v(x[:0], out))
    return graphs, exchanges, results


def measure_short_calls(gpus):
    timer = Timer(FEW_RANKS)

    def body(rank):
        torch.cuda.set_device(rank.index % gpus)
        with torch.cuda.stream(torch.cuda.Stream()):
            graphs, exchanges, results = short_calls_of(rank)
            times = {key: [] for key in graphs}
            for _ in range(ROUNDS):
                for key, graph in graphs.items():
                    times[key].append(timer.microseconds(graph.replay, 5, CALLS))
            for exchange in exchanges:
                exchange.check()
            for tokens in FEW_TOKENS:
                if not torch.equal(*(results[name, tokens] for name in ("plain", "gathered"))):
                    raise SystemExit(f"error: the results of gathered and plain input differ with {tokens} tokens")
        return times

    return slowest(ferry.Group.threads(FEW_RANKS).run(body))


def slowest(results):
    """Median, least and most over the rounds of the slowest rank's times. `results`: of each rank, {key: times of the rounds}."""
    times = {}
    for key in results[0]:
        rounds = [max(times_of[key][i] for times_of in results) for i in range(ROUNDS)]
        times[key] = {"median_us": statistics.median(rounds), "least_us": min(rounds), "most_us": max(rounds)}
    return times


def measure(gpus):
    ranks = max(gpus, 2)
    timer, generator = Timer(ranks), torch.Generator().manual_seed(1)
    ids = [torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices for _ in range(ranks)]

    def body(rank):
        torch.cuda.set_device(rank.index % gpus)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            modes = modes_of(rank, ids[rank.index].cuda(), ids[0].cuda())
            times = {(mode, what): [] for mode in modes for what in ("dispatch", "combine", "copy")}
            for _ in range(ROUNDS):
                for mode, what in times:
                    times[mode, what].append(timer.microseconds(modes[mode][what]))
        return {mode: modes[mode]["rows"] for mode in modes}, times

    results = ferry.Group.threads(ranks).run(body)
    return ranks, [rows for rows, _ in results], slowest([times for _, times in results])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the measurements")
    arguments = parser.parse_args()
    if not ferry.has_cuda() or not torch.cuda.is_available():
        raise SystemExit("error: this measurement needs a GPU and a build with the CUDA backend")
    gpus = torch.cuda.device_count()
    ranks, rows, times = measure(gpus)
    print(f"{ranks} ranks on {gpus} GPU(s), {torch.cuda.get_device_name()}, medians of {ROUNDS} rounds (least to most), us")
    for (mode, what), time in times.items():
        print(f"{mode:12}{what:12}{time['median_us']:10.1f}   ({time['least_us']:.1f} to {time['most_us']:.1f})")

    def at(mode, what):
        return times[mode, what]["median_us"]

    for what in ("dispatch", "combine"):
        ratio = at("shared", what) / (at("plain", what) + at("shared", "copy"))
        print(f"shared experts, {what}: {ratio:.2f} x (plain + copy of the shared rows), target 1.05")
    print(f"replicated input, dispatch: {at('replicated', 'dispatch') / at('replicated', 'copy'):.2f} x the copy of its rows, target 1.2")
    short = measure_short_calls(gpus)
    print(f"{FEW_RANKS} ranks on {gpus} GPU(s), graphs")
    for (call, tokens), time in short.items():
        print(f"{call:28}{tokens or '':5}{time['median_us']:8.1f}   ({time['least_us']:.1f} to {time['most_us']:.1f})")
    for tokens in FEW_TOKENS:
        pair = [short[f"{name} dispatch and combine", tokens]["median_us"] for name in ("gathered", "plain")]
        print(f"gathered input, {tokens} tokens: {pair[0] / pair[1]:.2f} x the plain pair, target 1.1")
    print(f"metadata: {short['metadata', 0]['median_us'] / short['barrier', 0]['median_us']:.2f} x a barrier, target 1.2")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"gpus": gpus, "ranks": ranks, "rows": rows, "settings": {"tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K,
                       "experts": EXPERTS, "format": "bf16", "layout": "expert_major"},
                       "times": [{"mode": mode, "call": what, **time} for (mode, what), time in times.items()],
                       "few_ranks": FEW_RANKS,
                       "few": [{"call": call, "tokens": tokens, **time} for (call, tokens), time in short.items()]}, file, indent=1)


if __name__ == "__main__":
    main()
