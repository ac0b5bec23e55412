"""The exchanges behind a Buffer. They are made when the first call says what it carries, by all ranks together."""

from __future__ import annotations

import struct

import ferry
from ferry.deep_ep._config import low_latency_settings, normal_settings

DEADLINE = 100.0  # seconds, as callers of the interface are used to
ROUNDING = 256  # of the most tokens of a rank: a slightly larger step needs no new exchange


def group_of(group, comm) -> ferry.Group | ferry.Rank:
    """A ferry group from what a Buffer is given."""
    if isinstance(group, (ferry.Group, ferry.Rank)):
        return group
    if comm is not None:
        return ferry.Group.custom(comm.Get_rank(), comm.Get_size(), comm.allgather, comm.Barrier)
    return ferry.Group.torch(group)


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

    def normal(self, arrays, tokens, hidden, experts, top_k):
        """Collective: (exchange that holds every rank's tokens, tokens of every rank)."""
        mine = struct.pack("4q", tokens, hidden, experts, top_k)
        said = [struct.unpack("4q", theirs) for theirs in self.rank.all_gather(mine)]
        for rank, (_, *shape) in enumerate(said):
            if shape != [hidden, experts, top_k]:
                raise ferry.UsageError(
                    f"dispatch: rank {rank} has [hidden, experts, top_k] = {shape}, "
                    f"rank {self.rank.index} has {[hidden, experts, top_k]}")
        tokens_of_ranks = [tokens for tokens, *_ in said]
        most = max(1, max(tokens_of_ranks))
        key = ("normal", hidden, experts, top_k)
        kept = self._made.get(key, [])
        if not kept or kept[0].config.max_tokens < most:
            # The smaller one lives on as long as a handle needs it.
            rounded = -(-most // ROUNDING) * ROUNDING
            kept = self._made[key] = [self._make(arrays, normal_settings(rounded, hidden, experts, top_k))]
        return kept[0], tokens_of_ranks

    def of_weights(self, arrays, exchange):
        """For the same plans, carrying one float32 a slot."""
        config = exchange.config
        key = ("weights", config.experts, config.top_k, config.max_tokens)
        if key not in self._made:
            columns = -(-config.top_k // 4) * 4
            settings = normal_settings(config.max_tokens, columns, config.experts, config.top_k)
            self._made[key] = [self._make(arrays, settings | {"format": "fp32", "wire": "fp32"})]
        return self._made[key][0]

    def low_latency(self, arrays, max_tokens, hidden, experts, top_k):
        return Pool(self, arrays, low_latency_settings(max_tokens, hidden, experts, top_k))

    def _make(self, arrays, settings):
        backend = "cuda" if arrays.on_device else "cpu"
        return ferry.Exchange(self.group, backend=backend, deadline=DEADLINE, **settings)


class Pool:
    """Exchanges alike: as many as there are calls between their halves, which all ranks have equally many of."""

    MOST = 4

    def __init__(self, exchanges, arrays, settings):
        self._key = ("low latency", *sorted(settings.items()))
        self._all = exchanges._made.setdefault(self._key, [])
        self._make = lambda: exchanges._make(arrays, settings)
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
