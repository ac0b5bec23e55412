"""What the packages with the calls of other systems share. Each makes calls of a ferry.Exchange under other names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import ferry
from ferry import _core


class SharedByCopies:
    """As of a ferry.Exchange: copy.copy() and copy.deepcopy() of what holds the object, such as a module, share it."""

    def __copy__(self) -> SharedByCopies:
        return self

    def __deepcopy__(self, memo: Any) -> SharedByCopies:
        return self


@contextlib.contextmanager
def in_words(words: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Errors of Ferry leave with these phrases in place of others: (Ferry's, the caller's)."""
    try:
        yield
    except ferry.Error as error:
        error.args = (_core._reworded(str(error), words), *error.args[1:])
        raise


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """What a framework raises, for tensors on 'meta' or on a GPU where they should be on the host, leaves with the argument's name."""
    try:
        yield
    except ferry.Error:
        raise
    except Exception as error:
        raise ferry.UsageError(f"{argument}: cannot be read: {error}") from error


@contextlib.contextmanager
def refusing_construction(group: ferry.Group | ferry.Rank) -> Iterator[None]:
    """What is wrong with the arguments of a constructor ends that of the peers too."""
    try:
        yield
    except BaseException as error:  # a rank that raised alone would leave its peers waiting
        _core._refuse_construction(group, str(error) if isinstance(error, ferry.Error) else repr(error))
        raise


def integer(name: str, value: Any) -> int:
    with contextlib.suppress(Exception):  # classes and arrays have __index__ too
        return operator.index(value)
    raise ferry.UsageError(f"{name}: expected an integer, got {value!r}")


class Unreadable:
    """Raises `error` wherever it is read as an array, a number, a flag or a name."""

    def __init__(self, error: ferry.Error):
        self.__dict__["_error"] = error

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise self._error

    __getattr__ = __dlpack__ = __index__ = __bool__ = __eq__ = __hash__ = _raise  # type: ignore[assignment]


def raise_from_call(function: Callable[..., Any], error: ferry.Error, first: str, given: dict[str, Any]) -> NoReturn:
    """Raises `error` and ends the peers' calls with it: calls the function with an argument `first` that cannot be read."""
    with contextlib.suppress(Exception):
        function(**given | {first: Unreadable(error)})
    raise error


_Function = TypeVar("_Function", bound=Callable[..., Any])


def refusing_misfits(first: str) -> Callable[[_Function], _Function]:
    """Arguments that do not fit the function's signature end the peers' calls too, because it is called all the same.

    `first`: the argument by which it is made to fail then. It ends the peers' calls if that cannot be read.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = signature.parameters
        of = function.__qualname__.replace(".__init__", "").rpartition(".")[-1]
        names = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD]
        positional = [name for name in names if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
        required = [name for name in names if parameters[name].default is inspect.Parameter.empty]

        def misfit(*args: Any, **kwargs: Any) -> NoReturn:
            reason = ""
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                reason = str(error)
            for name in [] if len(names) < len(parameters) else [name for name in kwargs if name not in names][:1]:
                reason = f"there is no argument {name!r}{_core._did_you_mean(name, names)}"
            text = f"{of}: {reason}; the arguments are: {', '.join(name for name in names if name != 'self')}"
            given = dict.fromkeys(required) | dict(zip(positional, args))
            given |= {name: value for name, value in kwargs.items() if name in names or len(names) < len(parameters)}
            raise_from_call(function, ferry.UsageError(text), first, given)

        return functools.update_wrapper(_core._fitted_function(function, misfit), function, updated=())  # type: ignore[return-value]

    return decorate


def raise_refusal(text: str, error: BaseException) -> NoReturn:
    """After this rank has refused a call because of `error`: raises UsageError, or Ctrl-C and its like as they are."""
    if not isinstance(error, Exception):
        raise error
    raise ferry.UsageError(text) from (error.__cause__ if isinstance(error, ferry.Error) else error)


def delivered_call(exchange: ferry.Exchange, lane: int = 0) -> int:
    """Number of the lane's last dispatch; 0 if that delivered nothing."""
    try:
        return exchange.last_dispatch_result(lane).call
    except ferry.UsageError:
        return 0
