"""The exchanges behind an ElasticBuffer: one for each shape of dispatch, made by all ranks together at its first call."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import ferry
from ferry.deep_ep._agreement import AgreeingExchanges
from ferry.deep_ep._config import normal_settings
from ferry.deep_ep._exchanges import (
    ELASTIC_BARRIER,
    ELASTIC_CONSTRUCTION,
    ELASTIC_GATHER,
    FIRST_ELASTIC_DISPATCH,
    ONE_HOP,
    require_same,
)

GATHER_TOKENS, GATHER_HIDDEN = 256, 4096  # of the exchange behind all_gather: it moves 2 MiB between two ranks at once


class Shape(NamedTuple):
    """What dispatches of one exchange have in common on all ranks."""

    do_expand: bool
    expert_alignment: int  # 1 without do_expand, because it then only rounds counts
    hidden: int
    num_experts: int
    top_k: int


NAMES = ("num_max_tokens_per_rank", "do_expand", "expert_alignment", "the number of columns of x", "num_experts",
         "the number of columns of topk_idx")


def settings_of(shape: Shape, max_tokens: int, multiple_reduction: bool) -> dict[str, Any]:
    settings = normal_settings(max_tokens, shape.hidden, shape.num_experts, shape.top_k)
    if shape.do_expand:
        settings |= {"layout": "expert_major", "alignment": shape.expert_alignment}
    if not multiple_reduction:
        settings |= {"reduction": "exact"} if shape.do_expand else {"reduction_level": "rank"}
    return settings


class ElasticExchanges(AgreeingExchanges):
    def __init__(self, group: Any, device_engine: str, deadline: float | None, settings: tuple[int, int],
                 error: BaseException | None):
        """Collective. `settings`: (num_max_tokens_per_rank, allow_multiple_reduction), the same on every rank.

        `error`: what was wrong with this rank's arguments, or None. If one rank has an error, every rank raises.
        """
        super().__init__(group, device_engine)
        self.deadline = deadline
        for rank, theirs in enumerate(self._construct(ELASTIC_CONSTRUCTION, settings, error)):
            for name, own, other in zip(("num_max_tokens_per_rank", "allow_multiple_reduction"), settings, theirs):
                if other != own:
                    raise ferry.UsageError(
                        f"ElasticBuffer: {name} is {own} on rank {self.rank.index} and {other} on rank {rank}: "
                        "pass the same on every rank")
        self.max_tokens, self.multiple_reduction = settings

    def for_dispatch(self, on_device: bool, shape: Shape, max_tokens: int) -> ferry.Exchange:
        """The exchange for a dispatch of `shape`. Collective the first time, and with more tokens than it has room for."""
        exchange = self._known(shape)
        if exchange is None or exchange.config.max_tokens < max_tokens:
            self._leave_calls()
            gathered = self._gather(FIRST_ELASTIC_DISPATCH, (max_tokens, *shape))
            require_same("dispatch", NAMES, gathered)
            settings = settings_of(shape, max(max_tokens, self.max_tokens), bool(self.multiple_reduction))
            # Handles keep the smaller exchange alive as long as they need it.
            exchange = self._make_on(on_device, settings)
            self._made[("dispatch", *shape)] = [exchange]
        self._last = exchange
        return exchange

    def refuse_dispatch(self, shape: Shape | None, error: BaseException) -> NoReturn:
        """The same for a dispatch with new routes, of `shape` if that could be read."""
        self.refuse(FIRST_ELASTIC_DISPATCH, error, None if shape is None else self._known(shape))

    def refuse_gather(self, error: BaseException) -> NoReturn:
        """The same for an all_gather."""
        self.refuse(ELASTIC_GATHER, error, self._made.get("gather", [None])[0], "all_gather_v")

    def barrier(self) -> None:
        """Collective: waits for the hosts of all ranks."""
        try:
            self._gather(ELASTIC_BARRIER)
        except ferry.UsageError:
            self._leave_calls()  # as the peers have, which are in another call
            raise

    @property
    def gathers_on_device(self) -> bool:
        """Whether all_gather takes tensors of GPUs: as its exchange does; before it is made, where the group uses NCCL."""
        made = self._made.get("gather")
        return made[0].config.memory == "device" if made else self.device_engine == "nccl"

    def for_gathers(self, on_device: bool) -> ferry.Exchange:
        """The exchange behind all_gather. Collective the first time."""
        if "gather" not in self._made:
            self._leave_calls()
            self._gather(ELASTIC_GATHER)
            settings = normal_settings(GATHER_TOKENS, GATHER_HIDDEN, self.rank.size, 1) | ONE_HOP
            if on_device and not self.rank.shares_memory:
                settings |= self._engine_transport()  # nvshmem has no all_gather_v between nodes
            self._made["gather"] = [self._make_on(on_device, settings)]
        return self._made["gather"][0]

    def _known(self, shape: Shape) -> ferry.Exchange | None:
        return self._made.get(("dispatch", *shape), [None])[0]
