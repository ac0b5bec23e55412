"""Times the calling thread in calls from Python and in the same calls from C++ (`ferry bench --launch eager`).

Median of 1,000 eager calls with an idle stream. 128 tokens, hidden 7168, top 8 of 256 experts, one rank per GPU as
processes of torch.distributed. Without a GPU: one rank of the CPU backend without tokens, which leaves the cost of the
Python layer. "operator": the operators of ferry.torch; "recorded": the same with gradients.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import tempfile
import time

import ferry

TOKENS, HIDDEN, TOP_K, EXPERTS, CALLS = 128, 7168, 8, 256, 1000


def median_us(call, settle):
    times = []
    for _ in range(CALLS):
        settle()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(exchange, x, ids, weights, settle, operators):
    kept = {}

    def dispatch():
        kept["rows"] = exchange.dispatch(x, ids, weights)

    def combine():
        rows = kept["rows"]
        exchange.combine(rows.data, rows.plan, row_weights=rows.weight, result=kept["result"])

    dispatch()
    kept["result"] = exchange.combine(kept["rows"].data, kept["rows"].plan, row_weights=kept["rows"].weight)
    result = {"dispatch": median_us(dispatch, settle), "combine": median_us(combine, settle)}
    if operators:
        import ferry.torch

        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        result["dispatch, operator"] = median_us(lambda: ferry.torch.dispatch(exchange, x, ids, weights), settle)
        result["combine, operator"] = median_us(
            lambda: ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight), settle)
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        recorded = ferry.torch.dispatch(exchange, x, ids, weights)
        result["dispatch, recorded"] = median_us(lambda: ferry.torch.dispatch(exchange, x, ids, weights), settle)
        result["combine, recorded"] = median_us(
            lambda: ferry.torch.combine(exchange, recorded.data, recorded, row_weights=recorded.weight), settle)
    return result


def numpy_arrays():
    import ml_dtypes
    import numpy as np

    return np.zeros((0, HIDDEN), ml_dtypes.bfloat16), np.zeros((0, TOP_K), np.int64), np.zeros((0, TOP_K), np.float32)


def torch_arrays():
    import torch

    torch.set_num_threads(1)
    return torch.zeros(0, HIDDEN, dtype=torch.bfloat16), torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(0, TOP_K)


def on_the_processor():
    def body(rank):
        # A small capacity, because the operators clear all of it.
        exchange = ferry.Exchange(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, capacity=1)
        measured = {}
        for framework, arrays in (("NumPy", numpy_arrays), ("PyTorch", torch_arrays)):
            if importlib.util.find_spec("torch") or framework == "NumPy":
                times = measure(exchange, *arrays(), lambda: None, operators=framework == "PyTorch")
                measured |= {f"{name}, {framework}": time_us for name, time_us in times.items()}
        return measured

    return ferry.Group.threads(1).run(body)[0]


def on_a_gpu(rank, ranks, rendezvous, results):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    exchange = ferry.Exchange(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    measured = measure(exchange, x, ids, weights, torch.cuda.synchronize, operators=True)
    dist.barrier()
    dist.destroy_process_group()
    results.put(measured)


def on_gpus(ranks):
    import torch.multiprocessing

    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:  # a failing rank ends the others
        torch.multiprocessing.spawn(on_a_gpu, (ranks, f"{folder}/meet", results), nprocs=ranks)
    measured = [results.get() for _ in range(ranks)]
    return {name: max(times[name] for times in measured) for name in measured[0]}


def in_cpp(program, ranks):
    """Microseconds of the calling thread for dispatch and combine, as `ferry bench` measures them."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([program, "bench", "--backend", "cuda", "--ranks", str(ranks), "--tokens", str(TOKENS), "--format", "bf16",
                        "--trace", "synth:uniform", "--experts", str(EXPERTS), "--top-k", str(TOP_K), "--hidden", str(HIDDEN),
                        "--work", "dispatch,combine", "--launch", "eager", "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        points = json.load(open(file.name))["rows"]
    return {point["work"]: point["host_us"] for point in points if point.get("host_us") is not None}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="path of the program ferry, for the C++ figures")
    given = parser.parse_args()
    gpus = 0
    if ferry.has_cuda():
        import torch

        gpus = torch.cuda.device_count()
    measured = on_gpus(gpus) if gpus else on_the_processor()
    cpp = in_cpp(given.program, gpus) if given.program and gpus else {}
    print(f"{'call':28} {'Python':>10} {'C++':>10}   us of the calling thread, {gpus or 1} {'rank' if gpus < 2 else 'ranks'}, {'cuda' if gpus else 'cpu, no tokens'}")
    for name, time_us in measured.items():
        of_cpp = cpp.get(name.split(",")[0])
        print(f"{name:28} {time_us:10.2f} {'' if of_cpp is None else f'{of_cpp:.2f}':>10}")


if __name__ == "__main__":
    main()
