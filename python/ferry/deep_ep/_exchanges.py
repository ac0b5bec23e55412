"""The exchanges behind a Buffer. They are made when the first call says what it carries, by all ranks together."""

from __future__ import annotations

import struct

import ferry
from ferry.deep_ep._config import low_latency_settings, normal_settings

DEADLINE = 100.0  # seconds, as callers of the interface are used to
ROUNDING = 256  # of the most tokens of a rank: a slightly larger step needs no new exchange
REFUSED = -1  # what a rank says in place of its tokens when it cannot take part
TEXT = 256  # bytes of what it says then

# What ranks agree on comes with the call they are in: a rank that is in another one is found out.
DISPATCH, FIRST_LOW_LATENCY, FIRST_WEIGHTS = range(3)
CALLS = (
    "a dispatch without a handle",
    "the first low-latency call of a shape",
    "the first combine with topk_weights of a shape",
)


def group_of(group, comm) -> ferry.Group | ferry.Rank:
    """A ferry group from what a Buffer is given. A caller's own keeps its deadline."""
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
    made.set_deadline(DEADLINE)  # before it is joined: a rank keeps the one it joins with
    return made


class Exchanges:
    def __init__(self, group):
        self.group = group
        self.rank = group if isinstance(group, ferry.Rank) else group.join()
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
        if not isinstance(self.group, ferry.Rank):
            self.group.leave()

    def agree(self, read):
        """Collective: (what `read` returns, tokens of every rank).

        `read` looks at this rank's arguments; its result has a `shape`: tokens, and what all ranks have alike, hidden,
        experts and top-k. What it raises on one rank is an error on all of them, in the same call.
        """
        found, mistake, mine = None, None, (REFUSED, 0, 0, 0)
        try:
            found = read()
            mine = found.shape
        except Exception as error:
            mistake = error
        said = self._say(DISPATCH, mine, mistake)
        tokens_of_ranks = [tokens for tokens, *_ in said]
        if REFUSED in tokens_of_ranks:
            self._raise_mistake(mistake, tokens_of_ranks.index(REFUSED))
        for rank, (_, *shape) in enumerate(said):
            if shape != list(mine[1:]):
                raise ferry.UsageError(
                    f"dispatch: rank {rank} has [hidden, experts, top_k] = {shape}, "
                    f"rank {self.rank.index} has {list(mine[1:])}")
        return found, tokens_of_ranks

    def _say(self, call, numbers=(0, 0, 0, 0), mistake=None):
        """Collective: the four numbers of every rank. UsageError on all where they are not in the same call."""
        said = [struct.unpack("5q", theirs) for theirs in self.rank.all_gather(struct.pack("5q", call, *numbers))]
        for rank, (theirs, *_) in enumerate(said):
            if theirs != said[0][0]:
                different = f"rank 0 is in {CALLS[said[0][0]]}, rank {rank} in {CALLS[theirs]}"
                raise ferry.UsageError(different) from mistake
        return [numbers for _, *numbers in said]

    def _raise_mistake(self, mistake, first):
        """Collective: raises this rank's own, or what rank `first` says."""
        text = "" if mistake is None else str(mistake) if isinstance(mistake, ferry.Error) else repr(mistake)
        said = self.rank.all_gather(text.encode()[:TEXT].ljust(TEXT, b"\0"))
        if mistake is not None:
            raise mistake
        raise ferry.UsageError(f"rank {first} refused dispatch: " + said[first].rstrip(b"\0").decode(errors="ignore"))

    def normal(self, arrays, tokens_of_ranks, hidden, experts, top_k):
        """Collective: an exchange that holds every rank's tokens."""
        most = max(1, max(tokens_of_ranks))
        key = ("normal", hidden, experts, top_k)
        kept = self._made.get(key, [])
        if not kept or kept[0].config.max_tokens < most:
            # The smaller one lives on as long as a handle needs it.
            rounded = -(-most // ROUNDING) * ROUNDING
            kept = self._made[key] = [self._make(arrays, normal_settings(rounded, hidden, experts, top_k))]
        return kept[0]

    def of_weights(self, arrays, exchange):
        """For the same plans, carrying one float32 a slot."""
        config = exchange.config
        key = ("weights", config.experts, config.top_k, config.max_tokens)
        if key not in self._made:
            columns = -(-config.top_k // 4) * 4
            settings = normal_settings(config.max_tokens, columns, config.experts, config.top_k)
            self._say(FIRST_WEIGHTS)
            self._made[key] = [self._make(arrays, settings | {"format": "fp32", "combine_type": "fp32"})]
        return self._made[key][0]

    def low_latency(self, arrays, max_tokens, hidden, experts, top_k):
        return Pool(self, arrays, low_latency_settings(max_tokens, hidden, experts, top_k))

    def first_low_latency(self, arrays, settings):
        """Collective: another exchange."""
        self._say(FIRST_LOW_LATENCY)
        return self._make(arrays, settings)

    def _make(self, arrays, settings):
        backend = "cuda" if arrays.on_device else "cpu"
        return ferry.Exchange(self.group, backend=backend, deadline=DEADLINE, **settings)


class Pool:
    """Exchanges alike: as many as there are calls between their halves, which all ranks have equally many of."""

    MOST = 4

    def __init__(self, exchanges, arrays, settings):
        self._key = ("low latency", *sorted(settings.items()))
        self._all = exchanges._made.setdefault(self._key, [])
        self._make = lambda: exchanges.first_low_latency(arrays, settings)
        self._busy = exchanges.__dict__.setdefault("_busy", set())

    def take(self):
        """One that is in no call."""
        for exchange in self._all:
            if id(exchange) not in self._busy:
                return exchange
        if len(self._all) == self.MOST:
            raise ferry.UsageError(f"{self.MOST} calls have been sent and their hooks were not called")
        self._all.append(self._make())
        return self._all[-1]

    def hold(self, exchange):
        self._busy.add(id(exchange))

    def release(self, exchange):
        self._busy.discard(id(exchange))
