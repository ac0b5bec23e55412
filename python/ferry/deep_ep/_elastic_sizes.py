"""What callers of ElasticBuffer ask before they use one: bytes, SMs and queue pairs."""

from __future__ import annotations

import math
import sys
from typing import Any

import ferry
from ferry.deep_ep._config import normal_settings

BUFFER_UNIT = 2 << 20  # bytes; sizes of buffers are multiples of it
GATHER_UNIT = 32  # bytes; each tensor of a session takes a multiple of it
NVLINK_GBS, RDMA_GBS = 450.0, 50.0  # GB/s out of a GPU: NVLink of Hopper, a NIC of 400 Gbit/s
HEADROOM = 1.25
LEAST_SMS, LEAST_SMS_ALONE = 4, 64


def rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def ranks_of(group: Any) -> int:
    """The ranks of a process group, a ferry.Group or a ferry.Rank."""
    return int(group.size if isinstance(group, (ferry.Group, ferry.Rank)) else group.size())


def buffer_bytes(ranks: int, max_tokens: int, hidden: int, top_k: int) -> int:
    """Bytes of an exchange for such dispatches. Without top_k a token may go to every rank."""
    if not max_tokens or not hidden:
        return 0
    slots = min(top_k or ranks, 32)
    experts = rounded_up(max(slots, ranks), ranks)
    return rounded_up(ferry.size_of(ferry.Config(**normal_settings(max_tokens, hidden, experts, slots)), ranks).total, BUFFER_UNIT)


def session_bytes(ranks: int, shapes: Any, dtype: Any) -> int:
    """Bytes that the gathered tensors of a session take. `shapes`: of this rank's tensors, or of one."""
    element = dtype.itemsize if isinstance(dtype.itemsize, int) else dtype().itemsize  # a class of NumPy, as numpy.float32
    return sum(rounded_up(ranks * math.prod(shape) * element, GATHER_UNIT) for shape in shapes_of(shapes))


def shapes_of(shapes: Any) -> list[tuple[int, ...]]:
    """A list of shapes, where callers may pass one shape."""
    shapes = tuple(shapes)
    return [shapes] if all(isinstance(length, int) for length in shapes) else [tuple(shape) for shape in shapes]


def device_sms() -> int | None:
    """SMs of the current GPU; None before PyTorch uses one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)


def theoretical_sms(topology: ferry.Topology, rdma_gbs: float, nvlink_gbs: float, sm_gbs: float, overlap: bool) -> int:
    """SMs that write rows as fast as the link to the other ranks takes them, where tokens go to all ranks alike.

    A rank writes a row for each rank that a token goes to. `sm_gbs`: GB/s that an SM writes. With `overlap` no more than that,
    because others use the rest of the GPU.
    """
    several = topology.nodes > 1
    link = (rdma_gbs or RDMA_GBS) if several else (nvlink_gbs or NVLINK_GBS)
    groups = topology.nodes if several else topology.ranks
    share_of_link = (groups - 1) / groups  # of the rows
    most = device_sms()
    if share_of_link == 0:
        return most or LEAST_SMS
    sms = math.ceil(HEADROOM * link / share_of_link / sm_gbs)
    sms = rounded_up(max(LEAST_SMS if overlap else LEAST_SMS_ALONE, sms), 2)
    return min(sms, most) if most else sms
