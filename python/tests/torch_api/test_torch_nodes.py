"""ferry.deep_ep between simulated nodes of a process group, over Gloo, with tensors in host memory."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, step_of
from internode_steps import check_all_calls, check_low_latency
from oracle import bf16
from torch_processes import run, tensor

RANKS = 4


def to_numpy(array):
    if array.dtype == torch.bfloat16:
        return array.detach().contiguous().view(torch.int16).numpy().view(bf16)
    return array.detach().numpy()


def cpu_tensor(array):
    return tensor(array, torch.device("cpu"))


def check_nodes(rank, device, rng):
    os.environ["FERRY_HOST_ID"] = f"host {2 * rank // RANKS}"
    step = step_of(rng, RANKS, most=60)
    room = deep_ep.Config(24, 8, 256, 16, 128).get_rdma_buffer_size_hint(2 * HIDDEN, RANKS)
    group = torch.distributed.group.WORLD
    with pytest.raises(ferry.UsageError, match="rank 3 has num_rdma_bytes = 0"):
        deep_ep.Buffer(group, int(2e9), 0 if rank == 3 else room)
    buffer = deep_ep.Buffer(group, int(2e9), room, low_latency_mode=True, explicitly_destroy=True)
    handle = check_all_calls(buffer, step, rank, cpu_tensor, to_numpy)
    check_low_latency(buffer, step, rank, cpu_tensor, to_numpy)
    # Every element is a tensor with the numbers of NumPy arrays.
    of_threads = ferry.Group.threads(RANKS, 2).run(lambda member: check_all_calls(
        deep_ep.Buffer(member, int(2e9), room), step, member.index))[rank]
    for element, expected in zip(handle, of_threads):
        assert element.dtype == expected.dtype and element.tolist() == expected.tolist()
    buffer.destroy()
    return len(handle)


def test_all_calls_between_nodes(rng):
    assert run(check_nodes, rng, RANKS, "gloo") == [10] * RANKS
