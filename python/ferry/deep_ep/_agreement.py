"""How ranks leave the calls that they are in, so that their hosts can gather."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import ferry
from ferry._core import _MUST_AGREE
from ferry.deep_ep._exchanges import CALLS, REFUSED_FIRST, GroupExchanges, text_of


class AgreeingExchanges(GroupExchanges):
    """A rank that must gather leaves a call of every exchange: its peers, whatever call they are in, then gather too."""

    _last: Any = None  # the ferry.Exchange of the last dispatch with new routes

    def refuse(self, call: int, error: BaseException, exchange: ferry.Exchange | None = None, operation: Any = "dispatch") -> NoReturn:
        """Raises `error`, and ends the peers' calls with it. `call`: this rank's, in CALLS.

        On host memory whatever call the peers are in. On a GPU they would learn too late that this rank gathers, so that only a
        call of `exchange` ends, by default the last dispatch's: `operation` is what the peers call.
        """
        exchange = exchange or self._last
        if exchange is None or exchange.config.memory != "device":
            self._leave_calls()
            self._gather(call, (REFUSED_FIRST,), error)
        exchange.refuse(text_of(error), operation=operation)
        raise error

    @contextlib.contextmanager
    def call(self, exchange: ferry.Exchange, name: int) -> Iterator[None]:
        """Around a call of `exchange`. Where a peer gathers, their calls differ, and all ranks get an error."""
        try:
            yield
        except ferry.UsageError as refusal:
            if must_agree(refusal):
                self._leave_calls(but=exchange)
                self.meet(CALLS[name])
            raise

    def _leave_calls(self, exchanges: Iterable[ferry.Exchange] = (), but: ferry.Exchange | None = None) -> None:
        # Every rank leaves every exchange, so that their numbers of calls stay equal.
        super()._leave_calls(exchange for made in self._made.values() for exchange in made if exchange is not but)


def must_agree(refusal: ferry.UsageError) -> bool:
    """Whether a peer has refused a call because it gathers."""
    return _MUST_AGREE in str(refusal)
