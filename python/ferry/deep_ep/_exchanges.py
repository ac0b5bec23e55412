"""The exchanges behind a Buffer. All ranks together make them when the first call of a shape needs them."""

from __future__ import annotations

import struct

import ferry
from ferry._core import _MUST_AGREE
from ferry.deep_ep import _layout, _normal
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._config import low_latency_settings, normal_settings

DEADLINE = 100.0  # seconds; callers of deep_ep expect about this
ROUNDING = 256  # the most tokens of a rank are rounded up to this, so that a slightly larger step needs no new exchange
REFUSED = -1  # gathered in place of a rank's tokens if its arguments are wrong
MESSAGE_BYTES = 256  # of the error message gathered then

# Ranks gather which call they are in together with its numbers. Different calls are an error on every rank.
DISPATCH, FIRST_LOW_LATENCY, FIRST_WEIGHTS = range(3)
CALLS = (
    "a dispatch without a handle",
    "the first low-latency call of a shape",
    "the first combine with topk_weights of a shape",
)


def group_of(group, comm) -> ferry.Group | ferry.Rank:
    """The ferry.Group or ferry.Rank for the arguments of Buffer. One that the caller passes keeps its deadline."""
    if isinstance(group, (ferry.Group, ferry.Rank)):
        return group
    if comm is not None:
        made = ferry.Group.custom(comm.Get_rank(), comm.Get_size(), comm.allgather, comm.Barrier)
    else:
        try:
            made = ferry.Group.torch(group)
        except ferry.UnsupportedError as missing:
            raise ferry.UsageError(
                "Buffer: expected a ferry.Group, a ferry.Rank, a communicator as comm or, with PyTorch, "
                f"a process group, got {type(group).__name__}; {missing}") from missing
    made.set_deadline(DEADLINE)  # before join(), because a rank keeps the deadline it joins with
    return made


class Exchanges:
    def __init__(self, group):
        self.group = group
        self.rank = group if isinstance(group, ferry.Rank) else group.join()
        self._made = {}

    def close(self):
        for exchanges in self._made.values():
            for exchange in exchanges:
                exchange.destroy()
        self._made = {}
        if not isinstance(self.group, ferry.Rank):
            self.group.leave()

    def agree(self, backend, error, settings, tokens):
        """Collective: the exchange for a dispatch with new routes on all ranks, with room for `tokens` of each.

        `settings`: hidden, experts as the caller counts them, and top-k (0 without ids), which all ranks must have in common;
        or None, and `error` what was wrong with this rank's arguments. If one rank has an error, every rank raises in this
        call.
        """
        mine = (REFUSED, 0, 0, 0) if settings is None else (tokens, *settings)
        gathered = self._gather(DISPATCH, mine, error)
        tokens_of_ranks = [theirs for theirs, *_ in gathered]
        if REFUSED in tokens_of_ranks:
            self._raise_error(error, tokens_of_ranks.index(REFUSED))
        for rank, (_, *theirs) in enumerate(gathered):
            if theirs != list(mine[1:]):
                raise ferry.UsageError(
                    f"dispatch: rank {rank} has [hidden, experts, top_k] = {theirs}, "
                    f"rank {self.rank.index} has {list(mine[1:])}")
        return self._normal(backend, max(1, *tokens_of_ranks), *settings)

    def _gather(self, call, numbers=(0, 0, 0, 0), error=None):
        """Collective: the four numbers of every rank. UsageError on all ranks if they are not in the same call."""
        gathered = [struct.unpack("5q", theirs) for theirs in self.rank.all_gather(struct.pack("5q", call, *numbers))]
        for rank, (theirs, *_) in enumerate(gathered):
            if theirs != gathered[0][0]:
                different = f"rank 0 is in {CALLS[gathered[0][0]]}, rank {rank} in {CALLS[theirs]}"
                raise ferry.UsageError(different) from error
        return [numbers for _, *numbers in gathered]

    def _raise_error(self, error, first):
        """Collective: raises this rank's own error, or that of rank `first`."""
        text = "" if error is None else str(error) if isinstance(error, ferry.Error) else repr(error)
        gathered = self.rank.all_gather(text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"))
        if error is not None:
            raise error
        message = gathered[first].rstrip(b"\0").decode(errors="ignore")
        raise ferry.UsageError(f"rank {first} refused dispatch: {message}")

    def _normal(self, backend, most, hidden, experts, top_k):
        """Collective: an exchange with room for `most` tokens of each rank. Without ids each rank is one expert."""
        key = ("normal", hidden, experts, top_k)
        made = self._made.get(key, [])
        if not made or made[0].config.max_tokens < most:
            # Handles keep the smaller exchange alive as long as they need it.
            rounded = -(-most // ROUNDING) * ROUNDING
            settings = normal_settings(rounded, hidden, experts if top_k else self.rank.size, top_k or self.rank.size)
            made = self._made[key] = [self._make_on(backend, settings)]
        return made[0]

    def expert_counts(self, num_tokens_per_expert, alignment):
        """Collective: routes to each local expert, rounded up, of a dispatch without ids: the sum of all ranks' counts.

        Every rank sends its counts to all ranks, as one row of an exchange. The host waits for the rows.
        """
        experts, ranks = len(num_tokens_per_expert), self.rank.size
        columns = -(-experts // 8) * 8  # rows are multiples of 16 bytes in every type
        arrays = arrays_of(num_tokens_per_expert)
        exchange = self._for_counts(arrays, columns)
        row = _normal.padded_columns(arrays.to(num_tokens_per_expert, "int32")[None], columns)
        received = arrays.empty((ranks, columns), "int32", row)
        exchange.dispatch((row,), arrays.arange(ranks, "int32", row)[None], memory=ferry.ReceiveBuffers(received))
        local = ferry.Placement.blocks(experts, ranks).experts_of(self.rank.index)
        sums = arrays.on_host(received).sum(0).tolist()
        return _layout.rounded_up([sums[expert] for expert in local], alignment)

    def _for_counts(self, arrays, columns):
        """An exchange that sends one row of `columns` int32 to every rank. Collective the first time."""
        key = ("counts", columns)
        if key not in self._made:
            settings = normal_settings(1, columns, self.rank.size, self.rank.size) | {"format": f"raw:{4 * columns}"}
            self._made[key] = [self._make_on("cuda" if arrays.on_device else "cpu", settings)]
        return self._made[key][0]

    def combined_weights(self, handle, topk_weights):
        """The topk_weights of a token's received rows, added by slot."""
        arrays = arrays_of(topk_weights)
        exchange = self.for_weights(handle.exchange)
        columns, slots = exchange.config.hidden, topk_weights.shape[1]
        if columns != slots:
            topk_weights = _normal.padded_columns(topk_weights, columns)
        result = arrays.empty((handle.plan.tokens, columns), "float32", topk_weights)
        return exchange.combine(arrays.contiguous(topk_weights), handle.plan, result=result)[:, :slots]

    def for_weights(self, exchange):
        """An exchange for the same plans that sends one float32 a slot. Collective the first time."""
        config = exchange.config
        key = ("weights", config.experts, config.top_k, config.max_tokens)
        if key not in self._made:
            columns = -(-config.top_k // 4) * 4
            settings = normal_settings(config.max_tokens, columns, config.experts, config.top_k)
            exchange.refuse(_MUST_AGREE)  # a rank that is in a dispatch agrees too, and all learn that their calls differ
            self._gather(FIRST_WEIGHTS)
            self._made[key] = [self._make_on(config.backend, settings | {"format": "fp32", "combine_type": "fp32"})]
        return self._made[key][0]

    def first_low_latency(self, backend, *shape):
        """Collective: one more exchange for low-latency calls of `shape`: M, H, E and K."""
        self._gather(FIRST_LOW_LATENCY)
        exchange = self._make_on(backend, low_latency_settings(*shape))
        self._made.setdefault("low latency", []).append(exchange)
        return exchange

    def _make_on(self, backend, settings):
        return ferry.Exchange(self.group, backend=backend, deadline=DEADLINE, **settings)
