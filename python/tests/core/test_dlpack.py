"""Arrays of other libraries, that come by DLPack: what is read-only stays as it is, and memory lives as long as the call."""

import weakref

import numpy as np
import pytest

import ferry
from oracle import same_bits

HIDDEN = 16
X = np.arange(3 * HIDDEN, dtype=np.float16).reshape(3, HIDDEN)
IDS = np.array([[0, 3], [1, 2], [3, 0]], np.int32)


class Lent:
    """An array that is known by its DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **settings):
        return self.array.__dlpack__(**settings)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Unversioned(Lent):
    """As libraries were before capsules told a version."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class MadeForEach(Lent):
    """Gives memory that is made for each import: the object itself does not have it."""

    def __init__(self, array):
        super().__init__(array)
        self.given = []

    def __dlpack__(self, **settings):
        copy = self.array.copy()
        self.given.append(weakref.ref(copy))
        return copy.__dlpack__(**settings)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def with_exchange(body):
    def run(rank):
        with ferry.Exchange(rank, experts=4, top_k=2, hidden=HIDDEN, max_tokens=4, format="fp16") as exchange:
            body(exchange)

    ferry.Group.threads(1).run(run)


@pytest.mark.parametrize("lent", [Lent, Unversioned, lambda array: array.__dlpack__(), lambda array: Lent(read_only(array))],
                         ids=["versioned", "unversioned", "capsule", "read-only"])
def test_they_are_read(lent):
    @with_exchange
    def _(exchange):
        expected = exchange.dispatch(X, IDS).data.copy()
        assert same_bits(exchange.dispatch(lent(X), lent(IDS)).data, expected)


@pytest.mark.parametrize("lent", [Lent, Unversioned])
def test_they_are_written_to(lent):
    @with_exchange
    def _(exchange):
        rows = exchange.dispatch(X, IDS)
        result = np.full((3, HIDDEN), 7, np.float16)
        exchange.combine(lent(rows.data), rows.plan, result=lent(result))
        assert same_bits(result, exchange.combine(rows.data, rows.plan))


def test_results_are_not_written_to_read_only_memory():
    @with_exchange
    def _(exchange):
        rows = exchange.dispatch(X, IDS)
        result = read_only(X)
        with pytest.raises(ferry.UsageError, match="result: is read-only"):
            exchange.combine(Lent(rows.data), rows.plan, result=Lent(result))
        weight = read_only(np.ones(exchange.capacity, np.float32))
        with pytest.raises(ferry.UsageError, match="memory.weight: is read-only"):
            exchange.dispatch(Lent(X), Lent(IDS), memory=ferry.ReceiveBuffers(weight=Lent(weight)))
        assert same_bits(result, X) and (weight == 1).all()


def test_memory_lives_until_the_call_has_ended():
    @with_exchange
    def _(exchange):
        tokens = MadeForEach(X)
        exchange.dispatch_send(tokens, Lent(IDS))
        assert tokens.given[-1]() is not None
        exchange.dispatch_receive()
        assert tokens.given[-1]() is None
