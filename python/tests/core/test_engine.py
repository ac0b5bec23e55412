"""Python functions as the transport of the backend 'collective': Group.custom(all_to_all_v=...)."""

import pickle
import threading

import numpy as np
import pytest

import ferry
from oracle import bf16

RANKS = 3


class Meeting:
    """How ranks that are threads gather bytes and exchange memory."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS)
        self.parts = [None] * RANKS
        self.aborted = threading.Event()

    def all_gather(self, rank, mine):
        self.parts[rank] = mine
        self.barrier.wait()
        gathered = list(self.parts)
        self.barrier.wait()
        return gathered

    def all_to_all_v(self, rank, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets):
        self.parts[rank] = send, send_bytes, send_offsets
        self.barrier.wait()
        for peer, (memory, sizes, offsets) in enumerate(self.parts):
            assert sizes[rank] == receive_bytes[peer]
            begin = receive_offsets[peer]
            receive[begin:begin + sizes[rank]] = memory[offsets[rank]:offsets[rank] + sizes[rank]]
        self.barrier.wait()


def run(body, change=lambda rank, transfer: transfer, **settings):
    """Calls body(exchange) as every rank; `change` may replace a rank's transport. Returns the results or errors, by rank."""
    meeting, transport = Meeting(), Meeting()
    results = [None] * RANKS

    def run_rank(rank):
        def transfer(lane, *arguments):
            transport.all_to_all_v(rank, *arguments)

        group = ferry.Group.custom(
            rank, RANKS, lambda mine: meeting.all_gather(rank, mine), lambda: meeting.all_gather(rank, b""),
            all_to_all_v=change(rank, transfer), abort=transport.aborted.set)
        try:
            results[rank] = group.run(lambda member: body(exchange_of(member, **settings)))[0]
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transport.barrier.abort()  # lets the engines of ranks that failed end
    return results, transport


def exchange_of(member, deadline=5):
    return ferry.Exchange(member, experts=6, top_k=2, hidden=16, max_tokens=4, deadline=deadline, backend="collective")


def step(exchange):
    x = np.arange(4 * 16).reshape(4, 16).astype(bf16) + exchange.rank
    ids = np.array([[0, 5], [2, 3], [1, 4], [5, 2]])
    rows = exchange.dispatch(x, ids, np.full((4, 2), 0.5, np.float32))
    return bool((exchange.combine(rows.data, rows.plan, row_weights=rows.weight) == x).all())


def test_rows_travel_through_the_function():
    assert run(lambda exchange: [step(exchange) for _ in range(5)])[0] == [[True] * 5] * RANKS


def errors_of(change, **settings):
    results, transport = run(step, change, **settings)
    assert all(isinstance(result, ferry.Error) for result in results), results
    return results, transport


def test_an_exception_of_the_function_is_named():
    def cut(rank, transfer):
        def cut_transfer(*arguments):
            raise OSError("the cable is out")

        return cut_transfer if rank == 1 else transfer

    for error in errors_of(cut)[0]:
        assert isinstance(error, ferry.PeerLostError) and error.record.peer == 1
        assert "the engine of rank 1 failed in dispatch 1" in str(error) and "the cable is out" in str(error)


def test_a_function_that_returns_early_is_noticed():
    for error in errors_of(lambda rank, transfer: lambda *arguments: None)[0]:
        assert isinstance(error, ferry.PeerLostError)
        assert "all_to_all_v returned before the bytes of rank" in str(error)


def test_the_memory_ends_with_the_call():
    kept = []

    def keep(rank, transfer):
        def keeping_transfer(*arguments):
            transfer(*arguments)
            kept.extend([arguments[1], arguments[4]])

        return keeping_transfer

    assert run(step, keep)[0] == [True] * RANKS
    for view in kept:
        with pytest.raises(ValueError, match="released"):
            view.tobytes()

    def lock(rank, transfer):
        def locking_transfer(*arguments):
            transfer(*arguments)
            if rank == 1:
                kept.append(pickle.PickleBuffer(arguments[4]))

        return locking_transfer

    for error in errors_of(lock)[0]:
        assert "all_to_all_v returned but still uses its memory" in str(error)


def test_abort_ends_a_function_that_blocks():
    def block(rank, transfer):
        return (lambda *arguments: transport_of_rank_1.wait()) if rank == 1 else transfer

    transport_of_rank_1 = threading.Event()
    results, transport = errors_of(block, deadline=0.5)
    transport_of_rank_1.set()
    assert transport.aborted.is_set()
    assert all(isinstance(error, ferry.TimeoutError) for error in results)


def test_the_function_must_not_call_ferry():
    def call_back(rank, transfer):
        return (lambda *arguments: step(exchanges[1])) if rank == 1 else transfer

    exchanges = {}

    def body(exchange):
        exchanges[exchange.rank] = exchange
        return step(exchange)

    results, _ = run(body, call_back)
    for error in results:
        assert isinstance(error, ferry.PeerLostError)
        assert "the engine of rank 1 failed in dispatch 1" in str(error) and "UsageError: lane 0 is in use" in str(error)


def test_a_group_without_a_transport_is_refused():
    group = ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None)
    with pytest.raises(ferry.UnsupportedError, match="this group has no engine"):
        exchange_of(group)
