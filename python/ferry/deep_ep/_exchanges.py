"""The exchanges behind an interface. All ranks together make them when the first call of a shape needs them."""

from __future__ import annotations

import contextlib
import os
import struct

import ferry
from ferry._core import _MUST_AGREE
from ferry.deep_ep import _layout, _nodes, _normal
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._config import dispatch_config, low_latency_settings, low_latency_size_hint, normal_settings, rdma_bytes

DEADLINE = 100.0  # seconds; callers of deep_ep expect about this
ROUNDING = 256  # the most tokens of a rank are rounded up to this, so that a slightly larger step needs no new exchange
# Gathered in place of a rank's first number if its arguments are wrong. If calls differ, peers get an error that says so, or with the
# second one still this rank's.
REFUSED, REFUSED_FIRST = -1, -2
MESSAGE_BYTES = 256  # of the error message gathered then
BACKENDS = ("automatic", "nvshmem", "collective")  # of tensors on GPUs of several hosts, as FERRY_DEEP_EP_BACKEND says
# Small calls of one row or part a rank: one hop is faster, and cuda has no level node in one hop. No such exchange combines.
ONE_HOP = {"hops": "one", "reduction_level": "rank"}

# Ranks gather which call they are in together with its numbers. Different calls are an error on every rank.
CALLS = (
    "a dispatch without a handle",
    "the first low-latency call of a shape",
    "the first combine with topk_weights of a shape",
    "the constructor of Buffer",
    # In these a rank learns from a refusal that a peer gathers.
    "a dispatch with a handle",
    "a combine",
    "a dispatch with num_worst_tokens of the last one's shape and size",
    "the constructor of ElasticBuffer",
    "the first dispatch of a shape of ElasticBuffer",
    "a dispatch of ElasticBuffer",
    "a combine of ElasticBuffer",
    "an all_gather of ElasticBuffer",
    "a barrier of ElasticBuffer",
    "the constructor of HybridEPBuffer",
    "a dispatch of HybridEPBuffer with new routes",
    "a dispatch of HybridEPBuffer with a handle",
    "a combine of HybridEPBuffer",
)
DISPATCH, FIRST_LOW_LATENCY, FIRST_WEIGHTS, CONSTRUCTION = range(4)
ELASTIC_CONSTRUCTION, FIRST_ELASTIC_DISPATCH, ELASTIC_DISPATCH, ELASTIC_COMBINE, ELASTIC_GATHER, ELASTIC_BARRIER = range(7, 13)
HYBRID_CONSTRUCTION, HYBRID_DISPATCH, HYBRID_DISPATCH_AGAIN, HYBRID_COMBINE = range(13, 17)
METHODS = {DISPATCH: "dispatch", FIRST_LOW_LATENCY: "low_latency_dispatch", CONSTRUCTION: "the constructor",
           ELASTIC_CONSTRUCTION: "the constructor", FIRST_ELASTIC_DISPATCH: "dispatch", ELASTIC_DISPATCH: "dispatch",
           ELASTIC_COMBINE: "combine", ELASTIC_GATHER: "all_gather",
           HYBRID_CONSTRUCTION: "the constructor", HYBRID_DISPATCH: "dispatch",
           HYBRID_DISPATCH_AGAIN: "dispatch", HYBRID_COMBINE: "combine"}
MOST_NUMBERS = 9  # that a rank gathers with its call

# What low-latency calls of one exchange have in common, in the words of their arguments.
LOW_LATENCY_SHAPE = (
    "num_max_dispatch_tokens_per_rank",
    "the number of columns of x",
    "num_experts",
    "the number of columns of topk_idx",
)


def group_of(group, comm, interface="Buffer") -> ferry.Group | ferry.Rank:
    """The ferry.Group or ferry.Rank for the arguments of a constructor. One that the caller passes keeps its deadline."""
    if isinstance(group, (ferry.Group, ferry.Rank)):
        return group
    if comm is not None:
        made = ferry.Group.custom(
            comm.Get_rank(), comm.Get_size(), comm.allgather, comm.Barrier, all_to_all_v=_transport_of(comm))
    else:
        try:
            made = ferry.Group.torch(group)
        except ferry.UnsupportedError as missing:
            raise ferry.UsageError(
                f"{interface}: expected a ferry.Group, a ferry.Rank, a communicator as comm or, with PyTorch, "
                f"a process group, got {type(group).__name__}; {missing}") from missing
    made.set_deadline(DEADLINE)  # before join(), because a rank keeps the deadline it joins with
    return made


def made_or_refused(exchange, operation, make):
    """make(), arrays for the call of `exchange` that follows. If it raises, the peers' calls end with the same error."""
    try:
        return make()
    except BaseException as error:
        exchange.refuse(text_of(error), operation=operation)
        raise


def text_of(error):
    """What the peers' error says."""
    return str(error) if isinstance(error, ferry.Error) else repr(error)


def device_engine_of(group) -> str:
    """Config.engine of `collective` for tensors on GPUs: NCCL for a process group that uses it, else what the group brought."""
    if group is None or isinstance(group, (ferry.Group, ferry.Rank)):
        return "automatic"
    import torch.distributed as dist

    return "nccl" if "nccl" in dist.get_backend(group) else "automatic"


def _transport_of(comm):
    """Moves rows between nodes over a duplicate of a communicator of mpi4py; None for others. Collective."""
    if not hasattr(comm, "Alltoallv"):
        return None
    from mpi4py import MPI

    own = comm.Dup()

    def all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets):
        own.Alltoallv([send, send_bytes, send_offsets, MPI.BYTE], [receive, receive_bytes, receive_offsets, MPI.BYTE])

    return all_to_all_v


def require_same(call, names, gathered):
    """UsageError if the ranks' numbers differ. `names`: of the first numbers; `gathered`: the numbers of each rank."""
    for rank, theirs in enumerate(gathered):
        for name, first, other in zip(names, gathered[0], theirs):
            if other != first:
                raise ferry.UsageError(f"{call}: {name} is {first} on rank 0 and {other} on rank {rank}: pass the same on every rank")


class GroupExchanges:
    """The exchanges that one interface has made over a group, and how its ranks agree on a new one."""

    deadline = None  # seconds; None: DEADLINE

    def __init__(self, group, device_engine="automatic"):
        """Collective. `device_engine`: as device_engine_of() returns. Each class then calls _construct()."""
        self.group = group
        self.device_engine = device_engine
        self.rank = group if isinstance(group, ferry.Rank) else group.join()
        self.topology = self.rank.topology
        self.nodes = self.topology.nodes
        self._made = {}

    def _construct(self, call, numbers, error):
        """Collective: the numbers of every rank's constructor, all of which must have the same backend.

        `error`: what was wrong with this rank's arguments, or None. If one rank has an error, every rank raises.
        """
        self._backend = os.environ.get("FERRY_DEEP_EP_BACKEND") or BACKENDS[0]
        if error is None and self._backend not in BACKENDS:
            error = ferry.UsageError(f"FERRY_DEEP_EP_BACKEND: expected {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {self._backend!r}")
        mine = (REFUSED,) if error is not None else (*numbers, BACKENDS.index(self._backend))
        gathered = self._gather(call, mine, error)
        backends = [BACKENDS[theirs.pop()] for theirs in gathered]
        for rank, theirs in enumerate(backends):
            if theirs != backends[0]:
                raise ferry.UsageError(f"FERRY_DEEP_EP_BACKEND is {backends[0]} on rank 0 and {theirs} on rank {rank}: set the same on every rank")
        return gathered

    def close(self):
        for exchanges in self._made.values():
            for exchange in exchanges:
                exchange.destroy()
        self._made = {}
        if not isinstance(self.group, ferry.Rank):
            self.group.leave()

    def meet(self, call):
        """Collective: this rank is in `call` of CALLS, and a peer gathers in another one. Raises."""
        self._gather(CALLS.index(call))

    def _gather(self, call, numbers=(0,), error=None):
        """Collective: the numbers of every rank, at most MOST_NUMBERS. UsageError on all ranks if they are not in the same call.

        If one rank has an error and says REFUSED or REFUSED_FIRST, all raise.
        """
        form = f"{1 + MOST_NUMBERS}q"
        mine = struct.pack(form, call, *numbers, *[0] * (MOST_NUMBERS - len(numbers)))
        gathered = [struct.unpack(form, theirs) for theirs in self.rank.all_gather(mine)]
        first_numbers = [first for _, first, *_ in gathered]
        if REFUSED_FIRST not in first_numbers:
            for rank, (theirs, *_) in enumerate(gathered):
                if theirs != gathered[0][0]:
                    different = f"rank 0 is in {CALLS[gathered[0][0]]}, rank {rank} in {CALLS[theirs]}"
                    raise ferry.UsageError(different) from error
        for refused in (REFUSED_FIRST, REFUSED):
            if refused in first_numbers:
                rank = first_numbers.index(refused)
                self._raise_error(METHODS[gathered[rank][0]], error, rank)
        return [theirs[: len(numbers)] for _, *theirs in gathered]

    def _raise_error(self, method, error, first):
        """Collective: raises this rank's own error, or that of rank `first`."""
        text = "" if error is None else text_of(error)
        gathered = self.rank.all_gather(text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"))
        if error is not None:
            raise error
        message = gathered[first].rstrip(b"\0").decode(errors="ignore")
        raise ferry.UsageError(f"rank {first} refused {method}: {message}")

    def combined_weights(self, handle, topk_weights):
        """The topk_weights of a token's received rows, added by slot."""
        arrays = arrays_of(topk_weights)
        exchange = self.for_weights(handle.exchange)
        columns, slots = exchange.config.hidden, topk_weights.shape[1]

        def make():
            padded = topk_weights if columns == slots else _normal.padded_columns(topk_weights, columns)
            return arrays.contiguous(padded), arrays.empty((handle.plan.tokens, columns), "float32", topk_weights)

        rows, result = made_or_refused(exchange, "combine", make)
        return exchange.combine(rows, handle.plan, result=result)[:, :slots]

    def for_weights(self, exchange):
        """An exchange for the same plans that sends one float32 a slot. Collective the first time."""
        config = exchange.config
        key = ("weights", config.experts, config.top_k, config.max_tokens)
        if key not in self._made:
            columns = -(-config.top_k // 4) * 4
            settings = normal_settings(config.max_tokens, columns, config.experts, config.top_k)
            self._leave_calls([exchange])
            self._gather(FIRST_WEIGHTS)
            self._made[key] = [self._make_on(config.memory == "device", settings | {"format": "fp32", "combine_type": "fp32"})]
        return self._made[key][0]

    def _leave_calls(self, exchanges):
        """Before ranks gather: a rank that is in a call of these exchanges gathers too, and all learn that their calls differ."""
        for exchange in exchanges:
            exchange.refuse(_MUST_AGREE)

    def _make_on(self, on_device, settings):
        settings = {"deadline": self.deadline or DEADLINE} | self._transport(on_device) | settings
        try:
            return ferry.Exchange(self.group, **settings)
        except ferry.UnsupportedError:
            # Every rank gets this error where neither nvshmem nor NCCL serves all. The group may have brought another engine.
            if settings["backend"] != "automatic" or self.device_engine != "automatic":
                raise
            with contextlib.suppress(ferry.UnsupportedError):
                return ferry.Exchange(self.group, **settings | self._engine_transport())
            raise

    def _transport(self, on_device):
        """The settings of an exchange that moves rows between this group's ranks. A token crosses once to each other node."""
        if self.rank.shares_memory:  # the nodes, if there are several, are simulated
            return {"backend": "cuda" if on_device else "cpu"} | ({} if self.nodes == 1 else {"hops": "two"})
        if not on_device:
            return {"backend": "collective", "memory": "host"}
        if self._backend == "collective":
            return self._engine_transport() | {"hops": "two"}
        return {"backend": self._backend, "memory": "device", "hops": "two"}

    def _engine_transport(self):
        """The settings of an exchange on device memory over an engine."""
        return {"backend": "collective", "memory": "device", "engine": self.device_engine}


class Exchanges(GroupExchanges):
    """The exchanges behind a Buffer."""

    def __init__(self, group, num_rdma_bytes=0, device_engine="automatic", error=None):
        """Collective. `num_rdma_bytes`: of the Buffer, needed between nodes.

        `error`: what was wrong with this rank's arguments. If one rank has an error, every rank raises.
        """
        super().__init__(group, device_engine)
        self.num_rdma_bytes = num_rdma_bytes
        self._route_columns = {}  # by framework: _nodes.RouteColumns
        for rank, (theirs,) in enumerate(self._construct(CONSTRUCTION, (0 if error else max(0, num_rdma_bytes),), error)):
            if theirs == 0 and self.nodes > 1:
                raise ferry.UsageError(
                    f"Buffer: rank {rank} has num_rdma_bytes = {theirs}, must be above 0 in a group of {self.nodes} nodes: "
                    "pass what Config.get_rdma_buffer_size_hint or Buffer.get_low_latency_rdma_size_hint returns")

    def rdma_bytes(self, config, num_sms, row_bytes, scales, slots):
        """The least num_rdma_bytes for a call between nodes with this config; without one, with the default."""
        return rdma_bytes(config or dispatch_config(num_sms), row_bytes, scales, slots, self.rank.size)

    def agree(self, on_device, error, settings, tokens):
        """Collective: the exchange for a dispatch with new routes on all ranks, with room for `tokens` of each.

        `settings`: hidden, experts as the caller counts them, and top-k (0 without ids), which all ranks must have in common;
        or None, and `error` what was wrong with this rank's arguments. If one rank has an error, every rank raises in this
        call.
        """
        mine = (REFUSED, 0, 0, 0) if settings is None else (tokens, *settings)
        gathered = self._gather(DISPATCH, mine, error)
        tokens_of_ranks = [theirs for theirs, *_ in gathered]
        for rank, (_, *theirs) in enumerate(gathered):
            if theirs != list(mine[1:]):
                raise ferry.UsageError(
                    f"dispatch: rank {rank} has [hidden, experts, top_k] = {theirs}, "
                    f"rank {self.rank.index} has {list(mine[1:])}")
        return self._normal(on_device, max(1, *tokens_of_ranks), *settings)

    def _normal(self, on_device, most, hidden, experts, top_k):
        """Collective: an exchange with room for `most` tokens of each rank. Without ids each rank is one expert."""
        key = ("normal", hidden, experts, top_k)
        made = self._made.get(key, [])
        if not made or made[0].config.max_tokens < most:
            # Handles keep the smaller exchange alive as long as they need it.
            rounded = -(-most // ROUNDING) * ROUNDING
            slots = top_k or min(self.rank.size, _layout.MOST_SLOTS)
            settings = normal_settings(rounded, hidden, experts if top_k else self.rank.size, slots)
            made = self._made[key] = [self._make_on(on_device, settings)]
        return made[0]

    def node_routes(self, exchange, is_token_in_rank, sm_limit):
        """Collective: the routes of every rank to this node, for the handle of a dispatch by `exchange`; see _nodes.

        None if a node has too many ranks. Every rank sends a row to each node, which goes to all its ranks.
        """
        most = max(len(self.topology.ranks_of(node)) for node in range(self.nodes))
        if most > _nodes.MOST_RANKS_OF_A_NODE:
            return None
        arrays = arrays_of(is_token_in_rank)
        columns = -(-(1 + exchange.config.max_tokens) // 8) * 8  # rows are multiples of 16 bytes in every type
        key = ("node routes", columns)
        if key not in self._made:
            settings = normal_settings(self.nodes, columns, self.rank.size, most) | ONE_HOP | {
                "format": f"raw:{4 * columns}", "capacity": self.rank.size}  # one row from every rank
            self._made[key] = [self._make_on(arrays.on_device, settings)]
        exchange = self._made[key][0]

        def make():
            if arrays not in self._route_columns:
                self._route_columns[arrays] = _nodes.RouteColumns(arrays, self.topology, is_token_in_rank)
            rows = self._route_columns[arrays].rows_to_send(is_token_in_rank, columns)
            return rows, arrays.empty((self.rank.size, columns), "int32", rows)

        rows, received = made_or_refused(exchange, "dispatch", make)
        exchange.dispatch((rows,), self._route_columns[arrays].ids, memory=ferry.ReceiveBuffers(received), sm_limit=sm_limit)
        return received

    def expert_counts(self, num_tokens_per_expert):
        """Collective: routes to each local expert of a dispatch without ids: the sum of all ranks' counts.

        Every rank sends its counts to all ranks, as rows of an exchange, one for MOST_SLOTS ranks. The host waits for them.
        """
        experts, ranks = len(num_tokens_per_expert), self.rank.size
        columns = -(-experts // 8) * 8  # rows are multiples of 16 bytes in every type
        arrays = arrays_of(num_tokens_per_expert)
        exchange = self._for_counts(arrays, columns)
        slots, rows = exchange.config.top_k, exchange.config.max_tokens

        def make():
            row = _normal.padded_columns(arrays.to(num_tokens_per_expert, "int32")[None], columns)
            all_ranks = [rank if rank < ranks else -1 for rank in range(rows * slots)]
            ids = arrays.from_list(all_ranks, "int32", row).reshape(rows, slots)
            return arrays.concatenate([row] * rows), ids, arrays.empty((ranks, columns), "int32", row)

        sent, ids, received = made_or_refused(exchange, "dispatch", make)
        exchange.dispatch((sent,), ids, memory=ferry.ReceiveBuffers(received))
        local = ferry.Placement.blocks(experts, ranks).experts_of(self.rank.index)
        sums = arrays.on_host(received).sum(0).tolist()
        return [sums[expert] for expert in local]

    def _for_counts(self, arrays, columns):
        """An exchange that sends a row of `columns` int32 to every rank. Collective the first time."""
        key = ("counts", columns)
        if key not in self._made:
            ranks, slots = self.rank.size, min(self.rank.size, _layout.MOST_SLOTS)
            settings = normal_settings(-(-ranks // slots), columns, ranks, slots) | ONE_HOP | {
                "format": f"raw:{4 * columns}", "capacity": ranks}  # one row from every rank
            self._made[key] = [self._make_on(arrays.on_device, settings)]
        return self._made[key][0]

    def first_low_latency(self, on_device, *shape):
        """Collective: one more exchange for low-latency calls of `shape`: M, H, E and K."""
        gathered = self._gather(FIRST_LOW_LATENCY, (*shape, self.num_rdma_bytes))
        require_same("low-latency mode", LOW_LATENCY_SHAPE, gathered)
        if self.nodes > 1:
            for rank, (most, hidden, experts, _, theirs) in enumerate(gathered):
                needed = low_latency_size_hint(most, hidden, self.rank.size, experts)
                if theirs < needed:
                    raise ferry.UsageError(
                        f"low-latency mode: rank {rank} has num_rdma_bytes = {theirs}, but such calls between nodes take {needed}: "
                        "pass what Buffer.get_low_latency_rdma_size_hint returns")
        exchange = self._make_on(on_device, low_latency_settings(*shape))
        self._made.setdefault("low latency", []).append(exchange)
        return exchange

    def refuse_first_low_latency(self, error):
        """Collective: takes part in the first low-latency call without having read its shape; raises `error`."""
        self._gather(FIRST_LOW_LATENCY, (REFUSED,), error)
