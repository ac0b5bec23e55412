"""Dispatch and combine in the call shapes of nvFuser, over ferry.Exchange.

    exchange = ferry.nvfuser.Exchange(ferry.Group.torch(), experts=256, top_k=8, hidden=7168, max_tokens=4096)
    received = exchange.dispatch(x, topk_idx)
    rows = experts(received.recv_x, received.recv_topk_idx)
    y = exchange.combine(rows, received.recv_src_idx, received.recv_src_rank,
                         received.n_tokens_to_rank, received.n_tokens_from_rank)

Arrays are of NumPy or PyTorch, on the backend's memory. Results are new arrays. docs/guides/nvfuser.md has the shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ferry
from ferry import _core
from ferry._call_shapes import (SharedByCopies, delivered_call, in_words, integer, naming, raise_refusal, refusing_construction,
                                refusing_misfits)
from ferry.deep_ep._arrays import arrays_of, rounded

__all__ = ["DispatchResult", "Exchange"]

_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MOST_ROWS = 1 << 24  # the largest max_tokens of a ferry.Exchange
_WHERE = ("backend", "engine", "memory", "hops", "window", "device")  # a call runs; received rows do not depend on it
_SETTINGS = ("experts", "top_k", "hidden", "max_tokens", "dtype", "deadline", "placement", *_WHERE)
_TEXT_BYTES = 512  # of a rank's refusal, as the ranks gather it

# What Ferry's messages call the arguments, and what they are called here. A combine returns its rows in a dispatch.
_DISPATCH_WORDS = (("tokens, but the tokens are ", "tokens, but x is "), ("tokens: ", "x: "), ("tokens[", "x["), ("tokens (", "x ("), ("ids (", "topk_idx ("), ("tokens is an array of", "x is an array of"), ("ids: ", "topk_idx: "),
                   ("ids is ", "topk_idx is "), (", or choose the format ", ", or construct the exchange with dtype = "),
                   ("format ", "dtype "), ("memory.parts[0]", "recv_x"), ("memory of part 0: ", "recv_x: "))
_COMBINE_WORDS = (("dispatch: ", "combine: "), ("refused dispatch ", "refused combine "), ("tokens: ", "rows: "),
                  ("tokens is an array of", "rows is an array of"), ("ids: ", "recv_src_rank: "), ("weights: ", "recv_src_idx: "))


class DispatchResult(NamedTuple):
    """What a rank has received. Integers are int64."""

    recv_x: Any
    """[rows, H]. top_k = 1: sorted by local expert, source rank, token. Else one row for each (token, rank), sorted by
    source rank, token."""
    recv_topk_idx: Any
    """top_k = 1: [rows], the global expert id of each row. Else [rows, K]: local ids of this rank's experts, -1 for others."""
    recv_src_idx: Any
    """[rows]: index of the row's token on its source rank."""
    recv_src_rank: Any
    """[rows]: source rank of each row."""
    n_tokens_to_rank: Any
    """[R]: rows that this rank has sent to each rank."""
    n_tokens_from_rank: Any
    """[R]: rows that this rank has received from each rank."""


class Exchange(SharedByCopies):
    """Dispatch and combine for one configuration; combine needs no plan and no ids.

    Collective: every rank constructs it and makes the same calls in the same order, one at a time. Blocking: every call
    returns when this rank's result is complete, on GPUs too, so calls cannot be captured.
    """

    @refusing_misfits("dtype")
    def __init__(
        self,
        group: ferry.Group | ferry.Rank,
        *,
        experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: str = "bf16",
        deadline: float = 30.0,
        placement: ferry.Placement | None = None,
        **where: Any,
    ):
        """`dtype`: type of tokens, rows and results: 'bf16', 'fp16' or 'fp32'. The rest as in ferry.Config: `placement` of the
        experts, and `where`, any of backend, engine, memory, hops, window and device."""
        self._rank = group if isinstance(group, ferry.Rank) else group.join()
        ranks = self._rank.size
        with refusing_construction(self._rank):
            if not isinstance(dtype, str) or dtype not in _TYPES:
                raise ferry.UsageError(f"dtype: {dtype!r} is not one of {', '.join(_TYPES)}")
            top_k, max_tokens = integer("top_k", top_k), integer("max_tokens", max_tokens)
            if ranks * max_tokens > _MOST_ROWS:
                raise ferry.UsageError(
                    f"nvfuser: max_tokens = {max_tokens} in a group of size {ranks}, must be at most {_MOST_ROWS // ranks}")
            for name in where:
                if not hasattr(ferry.Config, name) and name not in _WHERE:
                    raise ferry.UsageError(f"nvfuser: there is no setting {name!r}{_core._did_you_mean(name, _SETTINGS)}; the settings "
                                           f"are: {', '.join(_SETTINGS)}")
                if name not in _WHERE:
                    raise ferry.UsageError(f"nvfuser: {name} = {where[name]!r}: leave it out, nvFuser's calls decide it")
            if getattr(placement, "has_replicas", False):
                raise ferry.UnsupportedError("nvfuser: a placement with replicas is not supported: use ferry.Exchange")
            if getattr(placement, "tp", 1) > 1:
                raise ferry.UnsupportedError("nvfuser: experts in slices are not supported: use ferry.Exchange")
        self._dtype, self._type = dtype, _TYPES[dtype]
        self._top_k, self._hidden, self._max_tokens = top_k, hidden, max_tokens
        common: Any = {"hidden": hidden, "format": dtype, "combine_type": dtype, "deadline": deadline} | where
        placed: Any = {} if placement is None else {"placement": placement}
        with in_words((("configurations differ: format is ", "configurations differ: dtype is "),)):
            self._there = ferry.Exchange(
                self._rank, experts=experts, top_k=top_k, max_tokens=max_tokens,
                layout="expert_major" if top_k == 1 else "rank_major", **placed, **common)
        # Rows return in a dispatch whose experts are the ranks. Their tokens' indices travel as weights, bit for bit.
        self._back = ferry.Exchange(
            self._rank, experts=ranks, top_k=1, max_tokens=ranks * max_tokens,
            capacity=min(top_k, ranks) * max_tokens, **common)
        self._tokens = 0

    @refusing_misfits("x")
    def dispatch(self, x: Any, topk_idx: Any, *, recv_x: Any = None) -> DispatchResult:
        """Sends x [N, H] to the ranks of its experts, topk_idx [N, K]; -1 masks a slot. With top_k = 1 also [N].

        recv_x  [capacity, H] of the exchange's type: takes the rows, which the result's recv_x is then a view of
        """
        try:
            with naming("topk_idx"):
                if self._top_k == 1 and getattr(topk_idx, "ndim", None) == 1:
                    topk_idx = topk_idx.reshape(-1, 1)
            memory = self._memory_of(recv_x)
        except BaseException as error:  # a rank that raised alone would leave its peers waiting
            text = f"dispatch: rank {self._rank.index}: {str(error) or repr(error)}"
            self._there.refuse(text, operation="dispatch")
            raise_refusal(text, error)
        before = delivered_call(self._there)
        with in_words(_DISPATCH_WORDS):
            try:
                rows = self._there.dispatch(x, topk_idx, format=self._dtype, memory=memory)
                rows.wait_total()
                self._there.synchronize()
                self._there.check()
            finally:  # a dispatch that raises may have delivered its rows
                if delivered_call(self._there) not in (0, before):
                    self._tokens = len(x)
        return self._result_of(rows, recv_x)

    def _memory_of(self, recv_x: Any) -> ferry.ReceiveBuffers | None:
        if recv_x is None:
            return None
        with naming("recv_x"):
            shape = tuple(getattr(recv_x, "shape", ()))
            if len(shape) != 2 or shape[0] < self.capacity or shape[1] != self._hidden or arrays_of(recv_x).type_name(recv_x) != self._type:
                raise ferry.UsageError(f"recv_x: {getattr(recv_x, 'dtype', type(recv_x).__name__)} {list(shape)}, must be "
                                       f"{self._type} [{self.capacity} or more, {self._hidden}]")
        return ferry.ReceiveBuffers(recv_x)

    @property
    def capacity(self) -> int:
        """The most rows that a dispatch gives this rank."""
        return self._there.capacity

    def last_dispatch_result(self) -> DispatchResult:
        """The result of the last dispatch, also if that has delivered its rows and raised, as for ids out of range."""
        return self._result_of(self._there.last_dispatch_result())

    def _result_of(self, rows: ferry.DispatchResult, recv_x: Any = None) -> DispatchResult:
        total, arrays, rank = rows.wait_total(), arrays_of(rows.data), self._rank.index

        def int64(array: Any) -> Any:
            return arrays.copy(arrays.to(array, "int64"))

        source, between = rows.source[:total], rows.plan.tokens_between
        if self._top_k == 1:
            experts, counts = arrays.on_host(rows.group_expert).tolist(), arrays.on_host(rows.counts).tolist()
            ids = [expert for expert, count in zip(experts, counts) for _ in range(count)]
            topk = arrays.from_list(ids, "int64", rows.data)
        else:
            topk = int64(rows.local_ids[:total])
        return DispatchResult(
            arrays.copy(rows.data[:total]) if recv_x is None else recv_x[:total], topk, int64(source[:, 1]), int64(source[:, 0]),
            int64(between[rank]), int64(between[:, rank]))

    @refusing_misfits("rows")
    def combine(
        self,
        rows: Any,
        recv_src_idx: Any,
        recv_src_rank: Any,
        n_tokens_to_rank: Any,
        n_tokens_from_rank: Any,
        *,
        tokens: int | None = None,
        out: Any = None,
    ) -> Any:
        """Returns [N, H]: each token's rows added in fp32 from +0 in rank order and rounded once; zeros without rows.

        rows        [rows, H]: the outputs in the order of recv_x, for top_k > 1 the sum over this rank's experts
        tokens      N; default: of this rank's last dispatch
        out         [N, H] of the type of rows: takes the result, which is otherwise a new array

        If an argument of one rank is wrong, or what the ranks say differs, every rank raises UsageError and the exchange
        stays usable.
        """
        ranks = self._rank.size
        tokens = self._tokens if tokens is None else tokens
        fault: BaseException | None = None
        numbers = [0] * (1 + 2 * ranks)
        try:
            given = (recv_src_idx, recv_src_rank, n_tokens_to_rank, n_tokens_from_rank)
            tokens = integer("tokens", tokens)
            to_rank, from_rank = self._checked(rows, *given, tokens, out)
            numbers = [tokens, *to_rank, *from_rank]
        except BaseException as error:  # a rank that raised alone would leave its peers waiting
            fault = error
        try:
            gathered = self._agree("" if fault is None else str(fault) or repr(fault), numbers)
        except ferry.UsageError as refusal:
            raise_refusal(str(refusal), fault or refusal)
        self._check_counts(gathered)

        arrays = arrays_of(rows)
        rows = arrays.contiguous(rows)
        index = arrays.contiguous(arrays.to(recv_src_idx, "int32")).view(arrays.type("float32")).reshape(-1, 1)
        with in_words(_COMBINE_WORDS):
            back = self._back.dispatch(rows, recv_src_rank.reshape(-1, 1), index)
            total = back.wait_total()
            self._back.synchronize()
        index = arrays.to(arrays.contiguous(back.weight[:total]).view(arrays.type("int32")), "int64")
        self._agree(self._fault_of(arrays.on_host(index).tolist(), numbers[1 : 1 + ranks], tokens), [])

        sums = arrays.full((tokens, self._hidden), 0, "float32", rows)
        first = 0
        with arrays.quietly():
            for count in numbers[1 : 1 + ranks]:  # a rank's rows are of different tokens: the order of additions is fixed
                sums[index[first : first + count]] += arrays.to(back.data[first : first + count], "float32")
                first += count
            y = rounded(arrays, sums, self._type)
        if out is None:
            return y
        out[:] = y
        return out

    def _checked(self, rows: Any, src_idx: Any, src_rank: Any, to_rank: Any, from_rank: Any, tokens: int, out: Any) -> Any:
        ranks, arrays = self._rank.size, arrays_of(rows)
        if not 0 <= tokens <= self._max_tokens:
            raise ferry.UsageError(f"tokens = {tokens}, must be 0 to max_tokens = {self._max_tokens}")
        lengths = [0, 0, 0]
        for i, (name, array) in enumerate((("recv_src_idx", src_idx), ("recv_src_rank", src_rank), ("rows", rows))):
            with naming(name):
                lengths[i] = len(array) if getattr(array, "ndim", 0) else 0
        count = lengths[0 if lengths[0] == lengths[1] else 2]
        expected = {"recv_src_idx": (src_idx, count), "recv_src_rank": (src_rank, count),
                    "n_tokens_to_rank": (to_rank, ranks), "n_tokens_from_rank": (from_rank, ranks)}
        for name, array, shape, type_name in (
            ("rows", rows, (count, self._hidden), self._type),
            *([] if out is None else [("out", out, (tokens, self._hidden), self._type)]),
            *((name, array, (length,), "int64") for name, (array, length) in expected.items()),
        ):
            with naming(name):
                if not hasattr(array, "dtype") or arrays_of(array) is not arrays:
                    raise ferry.UsageError(f"{name}: a {type(array).__name__}, must be an array of the kind and device of rows")
                if arrays.type_name(array) != type_name or tuple(array.shape) != shape:
                    raise ferry.UsageError(
                        f"{name}: {arrays.type_name(array)} {list(array.shape)}, must be {type_name} {list(shape)}")
        if not getattr(getattr(out, "flags", None), "writeable", True):
            raise ferry.UsageError("out: is read-only")
        if getattr(out, "requires_grad", False):
            raise ferry.UsageError("out: requires gradients, which results never have: pass out.detach()")
        strides = () if out is None else out.stride() if callable(getattr(out, "stride", None)) else out.strides
        sizes = () if out is None else tuple(out.shape)
        if 0 not in sizes and any(stride == 0 and length > 1 for stride, length in zip(strides, sizes)):
            raise ferry.UsageError("out: several elements are one in memory: pass an array with memory for each")
        _core._require_apart({"out": out}, {"rows": rows} | {name: array for name, (array, _) in expected.items()})
        lists = {}
        for name, (array, _) in expected.items():
            with naming(name):
                lists[name] = arrays.on_host(array).tolist()
        src_idx, src_rank, to_rank, from_rank = lists.values()
        for name, values, limit in (("recv_src_rank", src_rank, ranks), ("recv_src_idx", src_idx, self._max_tokens),
                                    ("n_tokens_to_rank", to_rank, self._max_tokens + 1),
                                    ("n_tokens_from_rank", from_rank, self._max_tokens + 1)):
            for i, value in enumerate(values):
                if not 0 <= value < limit:
                    raise ferry.UsageError(f"{name}[{i}] = {value}, must be 0 to {limit - 1}; pass what dispatch returned")
        for rank in range(ranks):
            if src_rank.count(rank) != from_rank[rank]:
                raise ferry.UsageError(
                    f"recv_src_rank has {src_rank.count(rank)} rows of rank {rank}, n_tokens_from_rank[{rank}] = "
                    f"{from_rank[rank]}; pass arrays of one dispatch")
        return to_rank, from_rank

    def _agree(self, fault: str, numbers: list[int]) -> list[list[int]]:
        """Gathers the numbers of every rank, or raises a refusal that a rank has on every rank."""
        text = fault.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        gathered = self._rank.all_gather(text + b"".join(number.to_bytes(8, "little") for number in numbers))
        for rank, message in enumerate(gathered):
            said = message[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
            if said:
                raise ferry.UsageError(f"combine: rank {rank}: {said}")
        return [[int.from_bytes(message[at : at + 8], "little") for at in range(_TEXT_BYTES, len(message), 8)]
                for message in gathered]

    def _check_counts(self, gathered: list[list[int]]) -> None:
        """Of every rank: N, n_tokens_to_rank, n_tokens_from_rank. All ranks raise the same error."""
        ranks = self._rank.size
        for source, (tokens, *counts) in enumerate(gathered):
            for target in range(ranks):
                sent, received = counts[target], gathered[target][1 + ranks + source]
                if sent != received:
                    raise ferry.UsageError(
                        f"combine: n_tokens_to_rank[{target}] of rank {source} is {sent}, n_tokens_from_rank[{source}] of rank "
                        f"{target} is {received}; pass arrays of one dispatch on every rank")
            most = tokens * min(self._top_k, ranks)
            if sum(counts[:ranks]) > most:
                raise ferry.UsageError(
                    f"combine: n_tokens_to_rank of rank {source} adds up to {sum(counts[:ranks])} rows, its tokens, N = {tokens}, "
                    f"have at most {most}; pass tokens, N of the dispatch")

    def _fault_of(self, index: list[int], counts: list[int], tokens: int) -> str:
        """What is wrong with the returned rows' token indices, which stand in the order of their ranks; '' if nothing."""
        first, seen = 0, set[int]()
        for rank, count in enumerate(counts):
            if self._top_k > 1:
                seen.clear()  # top_k = 1: a token has one row on all ranks together
            for token in index[first : first + count]:
                if token >= tokens:
                    return f"rank {rank} returned a row of token {token}, tokens = {tokens}; check recv_src_idx there or pass tokens"
                if token in seen:
                    return f"rank {rank} returned a row of token {token}, which came before; check recv_src_idx there"
                seen.add(token)
            first += count
        return ""
