"""A rank of a job: launched_rank.py torchrun|mpirun. Compares gradients and compiled code with a dense sum, on GPUs if there are any.
Nothing here gives a process access to another's GPU."""

import os
import sys

import torch
import torch.distributed as dist

import ferry
from dense_check import check_dense_sum, settings_of

launcher = sys.argv[1]
local_rank = int(os.environ["LOCAL_RANK" if launcher == "torchrun" else "OMPI_COMM_WORLD_LOCAL_RANK"])
gpus = torch.cuda.device_count()
device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if launcher == "torchrun":
    dist.init_process_group("nccl" if gpus >= int(os.environ["WORLD_SIZE"]) else "gloo")
    group = ferry.Group.torch()
else:
    group = ferry.Group.mpi()
ranks = group.size
exchange = ferry.Exchange(group, **settings_of(ranks, device))
check_dense_sum(exchange, exchange.rank, ranks, device, seed=int(sys.argv[2]))
lines = group.join().all_gather(f"rank {exchange.rank} of {ranks} on {device.type} right".encode())
if exchange.rank == 0:  # prints all, so that lines are not mixed
    print(*(line.decode() for line in lines), sep="\n", flush=True)
if launcher == "torchrun":
    dist.destroy_process_group()
