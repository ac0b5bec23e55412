"""Makes a Group from a process group of torch.distributed."""

from __future__ import annotations

from ferry._core import Group
from ferry.error import UnsupportedError, UsageError


def make_group(process_group=None) -> Group:
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as missing:
        raise UnsupportedError(f"Group.torch: needs PyTorch, which cannot be imported: {missing}") from missing

    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("Group.torch: torch.distributed is not initialised: call init_process_group first")

    def all_gather(mine: bytes) -> list[bytes]:
        gathered: list[bytes] = [b""] * ranks
        dist.all_gather_object(gathered, mine, group=process_group)
        return gathered

    ranks = dist.get_world_size(process_group)
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise UsageError("Group.torch: this process is not a member of the process group")
    backend = "cuda" if "nccl" in dist.get_backend(process_group) else "cpu"
    return Group.custom(rank, ranks, all_gather, lambda: all_gather(b""), default_backend=backend)
