"""Ranks as processes of torch.distributed: with NCCL and a GPU each if there are GPUs, else with Gloo on the CPU."""

import tempfile
import traceback

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from deep_ep_steps import fp8
from oracle import bf16

GPUS = torch.cuda.device_count()
RANKS = GPUS if GPUS > 1 else 2
BACKEND = "nccl" if GPUS >= RANKS else "gloo"


def device_of(rank):
    return torch.device("cuda", rank % GPUS) if GPUS else torch.device("cpu")


def _in_a_process(rank, ranks, backend, file, seed, body, results):
    try:
        torch.set_num_threads(1)
        if GPUS:
            torch.cuda.set_device(device_of(rank))
        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
        results.put((rank, body(rank, device_of(rank), np.random.default_rng(seed)), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run(body, rng, ranks=RANKS, backend=BACKEND):
    """Calls body(rank, device, rng) as every rank, with the same random numbers; returns the results by rank."""
    context = torch.multiprocessing.get_context("spawn")
    results, seed = context.SimpleQueue(), int(rng.integers(1 << 31))
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_in_a_process, args=(r, ranks, backend, f"{folder}/meet", seed, body, results))
                     for r in range(ranks)]
        for process in processes:
            process.start()
        received = sorted((results.get() for _ in processes), key=lambda result: result[0])
        for process in processes:
            process.join(60)
    for rank, _, error in received:
        assert error is None, f"rank {rank}:\n{error}"
    return [value for _, value, _ in received]


def tensor(array, device):
    """A tensor with the bits of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def to_numpy(tensor):
    """An array with the elements of a tensor, bf16 and fp8 among them."""
    tensor = tensor.detach().cpu()
    for dtype, same_size, of_numpy in [(torch.bfloat16, torch.int16, bf16), (torch.float8_e4m3fn, torch.uint8, fp8)]:
        if tensor.dtype == dtype:
            return tensor.contiguous().view(same_size).numpy().view(of_numpy)
    return tensor.numpy()


def bits(tensor):
    return tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
