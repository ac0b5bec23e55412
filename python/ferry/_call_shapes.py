"""What the call shapes of other systems have in common: they are calls of a ferry.Exchange with other names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

import ferry
from ferry import _core


@contextlib.contextmanager
def in_words(words: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Errors of Ferry leave with these phrases in place of others: (Ferry's, the caller's)."""
    try:
        yield
    except ferry.Error as error:
        error.args = (_core._reworded(str(error), words), *error.args[1:])
        raise


@contextlib.contextmanager
def refusing_construction(group: ferry.Group | ferry.Rank) -> Iterator[None]:
    """What is wrong with the arguments of a constructor ends that of the peers too."""
    try:
        yield
    except BaseException as error:  # a rank that raised alone would leave its peers waiting
        _core._refuse_construction(group, str(error) if isinstance(error, ferry.Error) else repr(error))
        raise


def raise_refusal(text: str, error: BaseException) -> NoReturn:
    """After this rank has refused a call because of `error`: raises UsageError, or Ctrl-C and its like as they are."""
    if not isinstance(error, Exception):
        raise error
    raise ferry.UsageError(text) from (None if isinstance(error, ferry.Error) else error)


def delivered_call(exchange: ferry.Exchange, lane: int = 0) -> int:
    """Number of the lane's last dispatch; 0 if that delivered nothing."""
    try:
        return exchange.last_dispatch_result(lane).call
    except ferry.UsageError:
        return 0
