"""One rank of an MPI job, on one of two simulated nodes: internode_mpi_rank.py ferry|mpi4py"""

import os
import sys

if sys.argv[1] == "mpi4py":
    from mpi4py import MPI

    me, ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
else:
    me, ranks = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
os.environ["FERRY_HOST_ID"] = f"host {2 * me // ranks}"

import numpy as np

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import step_of
from internode_steps import check_all_calls, check_low_latency

step = step_of(np.random.default_rng(int(sys.argv[2])), ranks, most=60)
comm, group = (MPI.COMM_WORLD, None) if sys.argv[1] == "mpi4py" else (None, ferry.Group.mpi())
buffer = deep_ep.Buffer(group, int(2e9), int(1e9), low_latency_mode=True, explicitly_destroy=True, comm=comm)
handle = check_all_calls(buffer, step, me)
check_low_latency(buffer, step, me)
rank = buffer.exchanges.rank
assert not rank.shares_memory and rank.topology.nodes == 2 and len(handle) == 10
lines = rank.all_gather(f"rank {me} of {ranks}".encode())
if me == 0:  # prints all, so that lines are not mixed
    print(*(line.decode() for line in lines), sep="\n", flush=True)
buffer.destroy()
