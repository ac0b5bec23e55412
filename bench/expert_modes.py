"""What shared experts and replicated input cost on GPUs, beside a copy of the rows that they add or keep.

4,096 tokens a rank, 7168 columns of bf16, top-8 of 256 experts, uniform routing. Ranks are threads of one process, one for each GPU or
two on a single GPU. A time is that of one call out of 20 in a row, on the slowest rank; medians of 5 rounds in which the
modes take turns. Copies run on all ranks at the same time, as the calls do.
"""

import argparse
import json
import statistics
import threading

import ferry
import torch

TOKENS, HIDDEN, TOP_K, EXPERTS, CALLS, ROUNDS = 4096, 7168, 8, 256, 20, 5
SHAPE = dict(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, backend="cuda")


class Timer:
    """Times calls that all ranks make at the same time."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks)

    def microseconds(self, call):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._barrier.wait()
        call()  # so that all ranks have begun before the clock does
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / CALLS


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
    times = {}
    for key in results[0][1]:
        rounds = [max(times_of[key][i] for _, times_of in results) for i in range(ROUNDS)]
        times[key] = {"median_us": statistics.median(rounds), "least_us": min(rounds), "most_us": max(rounds)}
    return ranks, [rows for rows, _ in results], times


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
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"gpus": gpus, "ranks": ranks, "rows": rows, "settings": {"tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K,
                       "experts": EXPERTS, "format": "bf16", "layout": "expert_major"},
                       "times": [{"mode": mode, "call": what, **time} for (mode, what), time in times.items()]}, file, indent=1)


if __name__ == "__main__":
    main()
