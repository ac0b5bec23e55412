"""Host time of a call from Python, beside the same call from C++ (`ferry bench --launch eager`).

The time is that of the calling thread in an eager call on an idle stream: median of 1,000. 128 tokens, 7168 columns, top-8
of 256 experts, one process of torch.distributed for each GPU. Without a GPU: one rank of the CPU backend without tokens, so
that the overhead of Python remains. "operator" is a call through ferry.torch, "recorded" the same with gradients.
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


def median_us(call, synchronize):
    times = []
    for _ in range(CALLS):
        synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(exchange, x, ids, weights, synchronize, operators):
    last = {}

    def dispatch():
        last["rows"] = exchange.dispatch(x, ids, weights)

    def combine():
        rows = last["rows"]
        exchange.combine(rows.data, rows.plan, row_weights=rows.weight, result=last["result"])

    dispatch()
    last["result"] = exchange.combine(last["rows"].data, last["rows"].plan, row_weights=last["rows"].weight)
    result = {"dispatch": median_us(dispatch, synchronize), "combine": median_us(combine, synchronize)}
    if operators:
        import ferry.torch

        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        result["dispatch, operator"] = median_us(lambda: ferry.torch.dispatch(exchange, x, ids, weights), synchronize)
        result["combine, operator"] = median_us(
            lambda: ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight), synchronize)
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        recorded = ferry.torch.dispatch(exchange, x, ids, weights)
        result["dispatch, recorded"] = median_us(lambda: ferry.torch.dispatch(exchange, x, ids, weights), synchronize)
        result["combine, recorded"] = median_us(
            lambda: ferry.torch.combine(exchange, recorded.data, recorded, row_weights=recorded.weight), synchronize)
    return result


def numpy_inputs():
    import ml_dtypes
    import numpy as np

    return np.zeros((0, HIDDEN), ml_dtypes.bfloat16), np.zeros((0, TOP_K), np.int64), np.zeros((0, TOP_K), np.float32)


def torch_inputs():
    import torch

    torch.set_num_threads(1)
    return torch.zeros(0, HIDDEN, dtype=torch.bfloat16), torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(0, TOP_K)


def measure_on_cpu():
    def body(rank):
        # A capacity of one row, because the operators clear the whole capacity.
        exchange = ferry.Exchange(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, capacity=1)
        measured = {}
        for framework, inputs in (("NumPy", numpy_inputs), ("PyTorch", torch_inputs)):
            if importlib.util.find_spec("torch") or framework == "NumPy":
                times = measure(exchange, *inputs(), lambda: None, operators=framework == "PyTorch")
                measured |= {f"{name}, {framework}": time_us for name, time_us in times.items()}
        return measured

    return ferry.Group.threads(1).run(body)[0]


def run_gpu_rank(rank, ranks, init_file, results):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
    exchange = ferry.Exchange(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    measured = measure(exchange, x, ids, weights, torch.cuda.synchronize, operators=True)
    dist.barrier()
    dist.destroy_process_group()
    results.put(measured)


def measure_on_gpus(ranks):
    import torch.multiprocessing

    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:  # spawn() ends the other ranks if one fails
        torch.multiprocessing.spawn(run_gpu_rank, (ranks, f"{folder}/meet", results), nprocs=ranks)
    measured = [results.get() for _ in range(ranks)]
    return {name: max(times[name] for times in measured) for name in measured[0]}


def measure_cpp(program, ranks):
    """Microseconds of the calling thread for dispatch and combine, as the program measures them."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([program, "bench", "--backend", "cuda", "--ranks", str(ranks), "--tokens", str(TOKENS), "--format", "bf16",
                        "--trace", "synth:uniform", "--experts", str(EXPERTS), "--top-k", str(TOP_K), "--hidden", str(HIDDEN),
                        "--work", "dispatch,combine", "--launch", "eager", "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        points = json.load(open(file.name))["rows"]
    return {point["work"]: point["host_us"] for point in points if point.get("host_us") is not None}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="path of the program ferry, to measure C++ too")
    arguments = parser.parse_args()
    gpus = 0
    if ferry.has_cuda():
        import torch

        gpus = torch.cuda.device_count()
    measured = measure_on_gpus(gpus) if gpus else measure_on_cpu()
    cpp = measure_cpp(arguments.program, gpus) if arguments.program and gpus else {}
    print(f"{'call':28} {'Python':>10} {'C++':>10}   us of the calling thread, {gpus or 1} rank(s), {'cuda' if gpus else 'cpu, no tokens'}")
    for name, time_us in measured.items():
        cpp_us = cpp.get(name.split(",")[0])
        print(f"{name:28} {time_us:10.2f} {'' if cpp_us is None else f'{cpp_us:.2f}':>10}")


if __name__ == "__main__":
    main()
