"""Makes a Group from a process group of torch.distributed."""

from __future__ import annotations

import weakref

from ferry._core import Group
from ferry.error import UnsupportedError, UsageError

# By process group of the program: Ferry's own groups, one for the bootstrap and one for transfers.
_own_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def make_group(process_group=None) -> Group:
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as missing:
        raise UnsupportedError(f"Group.torch: needs PyTorch, which cannot be imported: {missing}") from missing

    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("Group.torch: torch.distributed is not initialised: call init_process_group first, in processes that "
                         "torchrun has started (srun: docs/hosts.md, Slurm)")
    ranks = dist.get_world_size(process_group)
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise UsageError("Group.torch: this process is not a member of the process group")

    backend = dist.get_backend(process_group)
    meeting, transfers = own_groups(dist, process_group or dist.group.WORLD, backend)

    def all_gather(mine: bytes) -> list[bytes]:
        gathered: list[bytes] = [b""] * ranks
        dist.all_gather_object(gathered, mine, group=meeting)
        return gathered

    return Group.custom(
        rank, ranks, all_gather, lambda: all_gather(b""),
        all_to_all_v=make_all_to_all_v(dist, transfers), default_memory="device" if "nccl" in backend else "host")


def own_groups(dist, process_group, backend):
    """Two process groups of the same ranks. Ferry calls each from another thread than the program and than the other one, and
    collectives of one process group must come in one order."""
    if process_group not in _own_groups:
        # They move host memory, which NCCL does not.
        host_backend = "gloo" if "nccl" in backend else backend
        members = dist.get_process_group_ranks(process_group)
        _own_groups[process_group] = tuple(
            dist.new_group(members, backend=host_backend, use_local_synchronization=True) for _ in range(2))
    return _own_groups[process_group]


def make_all_to_all_v(dist, process_group):
    import torch

    def all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets):
        # Copies, because the process group needs the parts one after the other, and because it may go on using its memory
        # after an error.
        packed = torch.empty(sum(send_bytes), dtype=torch.uint8)
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8)
        for mine, theirs in parts(packed, send, send_bytes, send_offsets):
            mine[:] = theirs
        dist.all_to_all_single(received, packed, receive_bytes, send_bytes, group=process_group)
        for theirs, mine in parts(received, receive, receive_bytes, receive_offsets):
            mine[:] = theirs

    return all_to_all_v


def parts(tensor, memory, sizes, offsets):
    """Pairs of views: the tensor's bytes of each rank, one after the other, and the memory's."""
    view = memoryview(tensor.numpy())
    begin = 0
    for size, offset in zip(sizes, offsets):
        if size > 0:
            yield view[begin:begin + size], memory[offset:offset + size]
        begin += size
