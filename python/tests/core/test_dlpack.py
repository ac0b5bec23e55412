"""Arrays of other libraries, through DLPack: read-only memory is not written, and memory lives as long as the call."""

import weakref

import numpy as np
import pytest

import ferry
from oracle import same_bits

HIDDEN = 16
X = np.arange(3 * HIDDEN, dtype=np.float16).reshape(3, HIDDEN)
IDS = np.array([[0, 3], [1, 2], [3, 0]], np.int32)


class DlpackOnly:
    """An array that offers DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **settings):
        return self.array.__dlpack__(**settings)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Unversioned(DlpackOnly):
    """As in libraries whose capsules have no version."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class MadeForEachImport(DlpackOnly):
    """Allocates new memory for each import, which only the capsule owns."""

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


@pytest.mark.parametrize("lent", [DlpackOnly, Unversioned, lambda array: array.__dlpack__(), lambda array: DlpackOnly(read_only(array))],
                         ids=["versioned", "unversioned", "capsule", "read-only"])
def test_dlpack_arrays_are_read(lent):
    @with_exchange
    def _(exchange):
        expected = exchange.dispatch(X, IDS).data.copy()
        assert same_bits(exchange.dispatch(lent(X), lent(IDS)).data, expected)


@pytest.mark.parametrize("lent", [DlpackOnly, Unversioned])
def test_dlpack_arrays_are_written(lent):
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
            exchange.combine(DlpackOnly(rows.data), rows.plan, result=DlpackOnly(result))
        weight = read_only(np.ones(exchange.capacity, np.float32))
        with pytest.raises(ferry.UsageError, match="memory.weight: is read-only"):
            exchange.dispatch(DlpackOnly(X), DlpackOnly(IDS), memory=ferry.ReceiveBuffers(weight=DlpackOnly(weight)))
        assert same_bits(result, X) and (weight == 1).all()


def test_memory_lives_until_the_receive_phase_ends():
    @with_exchange
    def _(exchange):
        tokens = MadeForEachImport(X)
        exchange.dispatch_send(tokens, DlpackOnly(IDS))
        assert tokens.given[-1]() is not None
        exchange.dispatch_receive()
        assert tokens.given[-1]() is None
