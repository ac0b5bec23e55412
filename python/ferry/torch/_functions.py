"""Dispatch and combine over tensors, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch

import ferry
from ferry import _core
from ferry._core import _PLAN_SOURCES_OFFSET
from ferry.torch import _operators
from ferry.torch._registry import exchange_of, handle_of


def _registered_combine(*inputs):
    return torch.ops.ferry.combine.default(*inputs)[0]


_REGISTERED = torch.ops.ferry.dispatch.default, _registered_combine
_KERNELS = _operators.dispatch, _operators.combine
_AUTOGRAD = _operators.DispatchFunction.apply, _operators.CombineFunction.apply


def _operators_for(tensor, indices, weights):
    """The functions to call as (dispatch, combine) where _core does not call the kernels directly.

    If anything observes operators they are the registered ones, which take longer: PyTorch's dispatcher costs more than
    the kernel's own host work.
    """
    plain = torch.Tensor
    if type(tensor) is not plain or type(indices) is not plain or not (weights is None or type(weights) is plain):
        tensors = isinstance(tensor, plain) and isinstance(indices, plain) and isinstance(weights, (plain, type(None)))
        return _REGISTERED if tensors else _KERNELS  # the kernels refuse other objects, also towards the peers
    given = [tensor, indices] if weights is None else [tensor, indices, weights]
    if not _core._is_unobserved() or all(each.is_meta for each in given):
        return _REGISTERED
    # PyTorch would take the fake kernels if only some are on 'meta', and the peers would wait.
    return _AUTOGRAD if tensor.is_cuda or tensor.is_cpu else _KERNELS


def _new_call_token(like):
    """A new tensor for one call of compiled code: compilers merge equal calls, but never two allocations."""
    return torch.empty(0, dtype=torch.uint8, device=like.device)


_MISSING: Any = None


def _refuse(exchange, operation, lane, text) -> NoReturn:
    """A rank that raised alone would leave its peers waiting."""
    used = exchange_of(exchange) if isinstance(exchange, int) else exchange
    used.refuse(text, lane=lane, operation=operation)
    raise ferry.UsageError(text)


def _refuse_misfits(exchange, operation, lane, surplus, unknown, names) -> NoReturn:
    wrong = f"{len(surplus)} positional arguments are too many"
    for name in list(unknown)[:1]:
        wrong = f"there is no argument {name!r}{_core._did_you_mean(name, names.split(', '))}"
    _refuse(exchange, operation, lane, f"{operation}: {wrong}; the arguments are: {names}")


class DispatchResult(NamedTuple):
    """The received rows, in tensors of their own: capacity for C rows in G groups. Rows past the last one are zero.

    It has what ferry.DispatchResult has, except `call`, and `plan` is a tensor.
    """

    data: torch.Tensor
    """[C, H]; expert_padded [G, capacity, H]."""
    weight: torch.Tensor
    """float32 [C]: each row's router weight; 0 without weights."""
    counts: torch.Tensor
    """int32 [G]: rows of each group."""
    row_offsets: torch.Tensor
    """int32 [G + 1]: first row of each group; the last element is the total."""
    plan: torch.Tensor
    """uint8: the plan's storage."""
    tokens: int
    """N of this rank."""
    exchange: ferry.Exchange | int
    """What dispatch was given."""
    lane: int
    """Of the dispatch."""

    scales = tile_offsets = local_ids = group_of_row = dots = None
    """Of formats, layouts and options that ferry.torch does not have."""

    @property
    def parts(self) -> tuple[torch.Tensor]:
        """(data,)."""
        return (self.data,)

    @property
    def groups(self) -> int:
        """G, the number of groups."""
        return self.counts.shape[0]

    @property
    def capacity(self) -> int:
        """Rows there is room for; expert_padded: rows of one expert."""
        return self.data.shape[-2]

    @property
    def group_expert(self) -> torch.Tensor:
        """int32 [G]: global expert id of each group, E + s for shared expert s, -1 for an empty slot. Memory of the exchange: do
        not change it."""
        handle = self.exchange if isinstance(self.exchange, int) else handle_of(self.exchange)
        if not torch.compiler.is_compiling() and _core._is_unobserved() and not self.counts.is_meta:
            return _core._group_expert(exchange_of(handle), self.lane)
        return torch.ops.ferry.group_expert.default(self.counts, handle, self.lane)

    @property
    def total(self) -> int | torch.Tensor:
        """row_offsets[G]: an int on host memory; on devices and in compiled code a tensor int32 []."""
        last = self.row_offsets[-1]
        return last if torch.compiler.is_compiling() or last.device.type != "cpu" else int(last)

    def wait_total(self) -> int:
        """The total as an int. On devices it waits for the stream."""
        return int(self.row_offsets[-1])

    def received_rows(self) -> torch.Tensor:
        """[total, H]: the rows of `data` that the call has received. Waits as wait_total() does. Not with expert_padded."""
        if self.data.dim() == 3:
            raise ferry.UsageError("received_rows: with expert_padded the rows of each expert start at a row of their own; use "
                                   "data[group][:counts[group]]")
        return self.data[: self.wait_total()]

    @property
    def source(self) -> torch.Tensor:
        """int32 [C, 3]: source rank, token and slot of each row. A view of the plan: do not change it."""
        end = _PLAN_SOURCES_OFFSET + 12 * self.weight.shape[0]
        return self.plan[_PLAN_SOURCES_OFFSET:end].view(torch.int32).view(-1, 3)


def dispatch(
    exchange: ferry.Exchange | int,
    x: torch.Tensor = _MISSING,
    ids: torch.Tensor = _MISSING,
    weights: torch.Tensor | None = None,
    *surplus: NoReturn,
    lane: int = 0,
    **unknown: NoReturn,
) -> DispatchResult:
    """Sends `x` [N, H] to the experts `ids` [N, K], -1 for a masked slot, with `weights` float32 [N, K]. Collective.

    `exchange` is an Exchange or, for torch.compile, its handle_of(exchange). If all tensors are on 'meta', no call is made: the result
    has shapes alone, and peers with other tensors wait for this rank. Gradients flow to x and weights. Raises
    ferry.UsageError for layouts and formats without gradients, and whatever Exchange.dispatch raises.
    """
    if surplus or unknown:
        _refuse_misfits(exchange, "dispatch", lane, surplus, unknown, "exchange, x, ids, weights, lane")
    if torch.compiler.is_compiling():
        operator, call_token = _REGISTERED[0], _new_call_token(x)
    else:
        received = _core._direct_dispatch(exchange, x, ids, weights, lane)
        if received is not None:
            return tuple.__new__(DispatchResult, (*received, exchange, lane))
        operator, call_token = _operators_for(x, ids, weights)[0], None
    handle = exchange if isinstance(exchange, int) else handle_of(exchange)
    return DispatchResult(*operator(x, ids, weights, handle, lane, call_token), x.shape[0], exchange, lane)


def combine(
    exchange: ferry.Exchange | int,
    outputs: torch.Tensor = _MISSING,
    dispatched: DispatchResult = _MISSING,
    *surplus: NoReturn,
    row_weights: torch.Tensor | None = None,
    lane: int = 0,
    **unknown: NoReturn,
) -> torch.Tensor:
    """Returns `outputs`, in the row order of dispatched.data, to their source ranks and sums them: [N, H]. Collective.

    `row_weights` is dispatched.weight, or None for weights of 1. Gradients flow to outputs and row_weights. On GPUs,
    passing fewer outputs than dispatched.data has rows asserts that the total is no larger. Raises whatever
    Exchange.combine raises.
    """
    if surplus or unknown:
        _refuse_misfits(exchange, "combine", lane, surplus, unknown, "exchange, outputs, dispatched, row_weights, lane")
    if not isinstance(dispatched, DispatchResult):
        _refuse(exchange, "combine", lane, f"dispatched: expected a DispatchResult of ferry.torch, got {type(dispatched).__name__}")
    if torch.compiler.is_compiling():
        operator, call_token = _REGISTERED[1], _new_call_token(outputs)
    else:
        result = _core._direct_combine(exchange, outputs, row_weights, dispatched.plan, dispatched.tokens, lane)
        if result is not None:
            return result
        operator, call_token = _operators_for(outputs, dispatched.plan, row_weights)[1], None
    handle = exchange if isinstance(exchange, int) else handle_of(exchange)
    return operator(outputs, row_weights, dispatched.plan, dispatched.tokens, handle, lane, call_token)
