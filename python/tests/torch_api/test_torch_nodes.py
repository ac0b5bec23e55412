"""ferry.deep_ep between simulated nodes of a process group: over Gloo with tensors in host memory, over NCCL on GPUs."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, step_of
from internode_steps import check_all_calls, check_low_latency
from torch_processes import GPUS, run, tensor, to_numpy


def check_nodes(rank, device, rng):
    """Every call between two nodes, with tensors of `device`."""
    group = torch.distributed.group.WORLD
    ranks = group.size()
    os.environ["FERRY_HOST_ID"] = f"host {2 * rank // ranks}"
    step = step_of(rng, ranks, most=60)
    room = deep_ep.Config(24, 8, 256, 16, 128).get_rdma_buffer_size_hint(2 * HIDDEN, ranks)
    with pytest.raises(ferry.UsageError, match=f"rank {ranks - 1} has num_rdma_bytes = 0"):
        deep_ep.Buffer(group, int(2e9), 0 if rank == ranks - 1 else room)
    buffer = deep_ep.Buffer(group, int(2e9), room, low_latency_mode=True, explicitly_destroy=True)
    on_device = lambda array: tensor(array, device)
    handle = check_all_calls(buffer, step, rank, on_device, to_numpy)
    check_low_latency(buffer, step, rank, on_device, to_numpy)
    # Every element is a tensor with the numbers of NumPy arrays.
    of_threads = ferry.Group.threads(ranks, 2).run(lambda member: check_all_calls(
        deep_ep.Buffer(member, int(2e9), room), step, member.index))[rank]
    for element, expected in zip(handle, of_threads):
        assert element.dtype == expected.dtype and element.tolist() == expected.tolist()
    buffer.destroy()
    return len(handle)


def check_nodes_on_host(rank, device, rng):
    return check_nodes(rank, torch.device("cpu"), rng)


def test_all_calls_between_nodes(rng):
    assert run(check_nodes_on_host, rng, 4, "gloo") == [10] * 4


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_all_calls_between_nodes_on_gpus(rng):
    assert run(check_nodes, rng, 2, "nccl") == [10] * 2
