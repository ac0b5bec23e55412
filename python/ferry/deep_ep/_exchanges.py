"""The exchanges behind a Buffer. All ranks together make them when the first call of a shape needs them."""

from __future__ import annotations

import struct

import ferry
from ferry.deep_ep._config import low_latency_settings, normal_settings

DEADLINE = 100.0  # seconds; callers of deep_ep expect about this
ROUNDING = 256  # the most tokens of a rank are rounded up to this, so that a slightly larger step needs no new exchange
REFUSED = -1  # gathered in place of a rank's tokens if its arguments are wrong
GATHER = "the ranks' hosts must gather their arguments"  # why a rank refuses a call: the others then gather too
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
        self.current = None  # the exchange of normal mode that all ranks use, and
        self.settings = None  # the settings of the calls it is for
        self.max_tokens = 0  # the most tokens of a rank in its calls
        self._made = {}
        self._closed = False

    def check_open(self):
        if self._closed:
            raise ferry.UsageError("Buffer: used after destroy()")

    def close(self):
        self._closed = True
        for exchanges in self._made.values():
            for exchange in exchanges:
                exchange.destroy()
        self._made = {}
        self.current = None
        if not isinstance(self.group, ferry.Rank):
            self.group.leave()

    def counted(self, arrays, error, routes):
        """Collective: (the exchange for these routes, (rows received here, routes to each local expert, tokens of ranks)).

        Without a gathering of the hosts, unless the ranks have made no exchange yet, some rank's call does not fit the
        exchange of the last one, or a rank's arguments are wrong: `error`, with `routes` None.
        """
        fits = routes is not None and self._fits(routes)
        if self.current is not None and not fits:
            self.current.refuse(GATHER)
        if fits:
            try:
                return self.current, self.current.dispatch_counts(routes.ids)
            except ferry.UsageError as refusal:
                if GATHER not in str(refusal):
                    raise
        self.agree(arrays, error, routes, 0 if routes is None else routes.tokens)
        return self.current, self.current.dispatch_counts(routes.ids)

    def with_room(self, arrays, error, routes, tokens):
        """An exchange for these routes with room for `tokens` of each rank, which all ranks pass alike.

        Collective if the last call had other settings or less room; otherwise the host waits for no other rank.
        """
        if self.current is None:
            self.agree(arrays, error, routes, 0 if routes is None else max(tokens, routes.tokens))
        elif error is not None:
            self.current.refuse(str(error))
            raise error
        elif self.settings != routes.settings or self.max_tokens < tokens:
            self.current.refuse(GATHER)
            self.agree(arrays, None, routes, max(tokens, routes.tokens))
        return self.current  # refuses more tokens than it has room for

    def _fits(self, routes):
        return (self.current is not None and self.settings == routes.settings
                and routes.tokens <= self.max_tokens)

    def agree(self, arrays, error, routes, tokens):
        """Collective: makes `self.current` an exchange for the routes of all ranks, with room for `tokens` of each.

        `routes`: this rank's Routes, whose `settings` all ranks must have in common; or None, and `error` what was wrong
        with its arguments. If one rank has an error, every rank raises in this call.
        """
        mine = (REFUSED, 0, 0, 0) if routes is None else (tokens, *routes.settings)
        gathered = self._gather(DISPATCH, mine, error)
        tokens_of_ranks = [theirs for theirs, *_ in gathered]
        if REFUSED in tokens_of_ranks:
            self._raise_error(error, tokens_of_ranks.index(REFUSED))
        for rank, (_, *settings) in enumerate(gathered):
            if settings != list(mine[1:]):
                raise ferry.UsageError(
                    f"dispatch: rank {rank} has [hidden, experts, top_k] = {settings}, "
                    f"rank {self.rank.index} has {list(mine[1:])}")
        self.current = self._normal(arrays, max(1, *tokens_of_ranks), routes)
        self.settings = routes.settings
        self.max_tokens = self.current.config.max_tokens

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

    def _normal(self, arrays, most, routes):
        """Collective: an exchange with room for `most` tokens of each rank."""
        key = ("normal", *routes.settings)
        made = self._made.get(key, [])
        if not made or made[0].config.max_tokens < most:
            # Handles keep the smaller exchange alive as long as they need it.
            rounded = -(-most // ROUNDING) * ROUNDING
            settings = normal_settings(rounded, routes.hidden, routes.experts, routes.slots)
            made = self._made[key] = [self._make(arrays, settings)]
        return made[0]

    def for_weights(self, arrays, exchange):
        """An exchange for the same plans that sends one float32 a slot. Collective the first time."""
        config = exchange.config
        key = ("weights", config.experts, config.top_k, config.max_tokens)
        if key not in self._made:
            columns = -(-config.top_k // 4) * 4
            settings = normal_settings(config.max_tokens, columns, config.experts, config.top_k)
            exchange.refuse(GATHER)  # a rank that is in a dispatch gathers too, and all learn that their calls differ
            self._gather(FIRST_WEIGHTS)
            self._made[key] = [self._make(arrays, settings | {"format": "fp32", "combine_type": "fp32"})]
        return self._made[key][0]

    def first_low_latency(self, backend, *shape):
        """Collective: one more exchange for low-latency calls of `shape`: M, H, E and K."""
        self._gather(FIRST_LOW_LATENCY)
        exchange = self._make_on(backend, low_latency_settings(*shape))
        self._made.setdefault("low latency", []).append(exchange)
        return exchange

    def _make(self, arrays, settings):
        return self._make_on("cuda" if arrays.on_device else "cpu", settings)

    def _make_on(self, backend, settings):
        return ferry.Exchange(self.group, backend=backend, deadline=DEADLINE, **settings)
