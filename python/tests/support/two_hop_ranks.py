"""Ranks of this program, which are processes on simulated nodes and share the GPUs if there are any, make every call of deep_ep.

usage: two_hop_ranks.py NODES SEED, with the node of each rank as a digit.
"""

import sys

import numpy as np
import torch

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, step_of
from internode_steps import check_all_calls, check_low_latency
from torch_processes import tensor, to_numpy

nodes = [int(digit) for digit in sys.argv[1]]
ranks = len(nodes)


def make_calls(rank):
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank.index % torch.cuda.device_count())
        torch.cuda.set_device(device)
    step = step_of(np.random.default_rng(int(sys.argv[2])), ranks, most=20)
    room = deep_ep.Config(24, 8, 256, 16, 128).get_rdma_buffer_size_hint(2 * HIDDEN, ranks)
    buffer = deep_ep.Buffer(rank, int(2e9), room, low_latency_mode=True, explicitly_destroy=True)
    on_device = lambda array: tensor(array, device)
    handle = check_all_calls(buffer, step, rank.index, on_device, to_numpy)
    check_low_latency(buffer, step, rank.index, on_device, to_numpy)
    buffer.destroy()
    return len(handle)


assert ferry.Group.processes(ferry.Topology(nodes)).run(make_calls) == [10] * ranks
print("every call returned what it should")
