"""Groups of threads, custom groups of processes, and what run() returns."""

import multiprocessing
import sys

import numpy as np
import pytest

import ferry
from oracle import bf16


def test_run_returns_what_every_rank_returned():
    group = ferry.Group.threads(4)
    assert group.size == 4
    assert group.run(lambda rank: rank.index * 10) == [0, 10, 20, 30]
    assert group.run(lambda rank: (rank.size, rank.same_process)) == [(4, True)] * 4
    assert group.run(lambda rank: b"".join(rank.all_gather(bytes([rank.index] * 3)))) == [b"\0\0\0\1\1\1\2\2\2\3\3\3"] * 4


def test_the_nodes_of_a_group():
    def body(rank):
        nodes = rank.topology
        with pytest.raises(ferry.UsageError, match="rank = 6, must be 0 to 5"):
            nodes.node_of(6)
        with pytest.raises(ferry.UsageError, match="node = -1, must be 0 to"):
            nodes.ranks_of(-1)
        return (repr(nodes), nodes.simulated, [nodes.node_of(r) for r in range(6)], [nodes.local_rank_of(r) for r in range(6)],
                [nodes.ranks_of(node) for node in range(nodes.nodes)])

    assert ferry.Group.threads(6).run(body)[0] == ("Topology(6 ranks on 1 node)", False, [0] * 6, list(range(6)), [list(range(6))])
    assert ferry.Group.threads(6, nodes=2).run(body)[5] == (
        "Topology(6 ranks on 2 simulated nodes)", True, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("start", [ferry.Group.threads, ferry.Group.processes])
def test_nodes_of_any_sizes(start):
    def nodes_of(rank):
        topology = rank.topology
        return topology.simulated, [topology.node_of(r) for r in range(4)], topology.relay_of(3, 1), topology.relay_of(1, 0)

    assert start(ferry.Topology([5, 2, 5, 5])).run(nodes_of) == [(True, [0, 1, 0, 0], 1, 0)] * 4
    with pytest.raises(ferry.UsageError, match="has nodes of its own"):
        start(ferry.Topology([0, 1]), nodes=2)


def test_partial_sums_by_node():
    """Experts' rows of 256, 1 and 1 lie on ranks 0 to 2, and bf16 rounds 257 to 256."""

    def sums(level, nodes):
        def body(rank):
            exchange = ferry.Exchange(
                rank, experts=4, top_k=3, hidden=8, max_tokens=1, format="fp32", combine_type="bf16", reduction_level=level)
            ids = np.array([[0, 1, 2]] if rank.index == 0 else np.zeros((0, 3)), np.int32)
            rows = exchange.dispatch(np.ones((len(ids), 8), np.float32), ids)
            outputs = rows.data[: rows.total] * np.float32(256 if rank.index == 0 else 1)
            result = np.empty((len(ids), 8), np.float32)
            exchange.combine(outputs, rows.plan, result=result)
            return exchange.config.reduction_level, result.tolist()

        return ferry.Group.threads(4, nodes=nodes).run(body)[0]

    assert sums("automatic", 1) == sums("rank", 2) == ("rank", [[258.0] * 8])
    assert sums("automatic", 2) == ("node", [[257.0] * 8])  # 256 + 1 on the first node, 1 on the second


def test_all_gather_needs_equal_lengths():
    def body(rank):
        with pytest.raises(ferry.UsageError, match="rank 0 passes 3, rank 2 passes 5"):
            rank.all_gather(b"x" * (5 if rank.index == 2 else 3))
        return rank.all_gather(bytes([rank.index]))

    assert ferry.Group.threads(3).run(body) == [[b"\0", b"\1", b"\2"]] * 3


class Pipes:
    """How processes that were started with pipes between them gather bytes: all to rank 0, and back."""

    def __init__(self, rank, pipes):
        self.rank, self.pipes = rank, pipes

    def all_gather(self, mine):
        if self.rank > 0:
            self.pipes[0].send_bytes(mine)
            return self.pipes[0].recv()
        gathered = [mine] + [pipe.recv_bytes() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(gathered)
        return gathered

    def barrier(self):
        self.all_gather(b"")


def in_a_process(rank, ranks, pipes, body, results):
    meeting = Pipes(rank, pipes)
    group = ferry.Group.custom(rank, ranks, meeting.all_gather, meeting.barrier)
    try:
        results.put((rank, body(group)))
    except Exception as error:  # run_processes() raises it
        results.put((rank, error))


def run_processes(ranks, body, timeout=60):
    context = multiprocessing.get_context("spawn")
    links = [context.Pipe() for _ in range(1, ranks)]
    results = context.SimpleQueue()
    ends = [[link[0] for link in links]] + [[link[1]] for link in links]
    processes = [context.Process(target=in_a_process, args=(r, ranks, ends[r], body, results)) for r in range(ranks)]
    for process in processes:
        process.start()
    received = dict(results.get() for _ in processes)
    for process in processes:
        process.join(timeout)
        assert process.exitcode == 0
    for value in received.values():
        if isinstance(value, Exception):
            raise value
    return [received[rank] for rank in range(ranks)]


def exchange_in_a_group(group):
    exchange = ferry.Exchange(group, experts=6, top_k=2, hidden=8, max_tokens=4)
    rank = exchange.rank
    x = np.full((2, 8), rank + 1, bf16)
    rows = exchange.dispatch(x, np.array([[0, 5], [2, 3]], np.int64), np.full((2, 2), 0.5, np.float32))
    y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
    second = ferry.Exchange(group, experts=3, top_k=1, hidden=8, max_tokens=1)  # uses the same joined rank
    assert second.ranks == 3 and not group.join().same_process
    group.join().barrier()
    return bool((y == x).all()), rows.plan.total


def test_a_custom_group_of_processes():
    assert run_processes(3, exchange_in_a_group) == [(True, 3), (True, 6), (True, 3)]


def leave_early(group):
    exchange = ferry.Exchange(group, experts=2, top_k=1, hidden=8, max_tokens=1)
    if exchange.rank == 1:
        exchange.destroy()
        group.leave()
        return "left"
    try:
        exchange.dispatch(np.ones((1, 8), bf16), np.ones((1, 1), np.int32))
    except ferry.PeerLostError as error:
        return error.record.peer
    return "nothing"


def test_a_rank_that_leaves_is_reported_at_once():
    assert run_processes(2, leave_early) == [1, "left"]


def test_errors_can_be_pickled():
    import pickle

    def body(rank):
        try:
            ferry.Exchange(rank, experts=2, top_k=1, hidden=8, max_tokens=2, capacity=1).dispatch(
                np.ones((2, 8), bf16), np.zeros((2, 1), np.int32))
        except ferry.OverflowError as error:
            again = pickle.loads(pickle.dumps(error))
            return type(again) is ferry.OverflowError and again.record == error.record and str(again) == str(error)

    assert ferry.Group.threads(1).run(body) == [True]


def test_group_torch_without_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the import fail
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    with pytest.raises(ferry.UnsupportedError, match="Group.torch: needs PyTorch"):
        ferry.Group.torch()


def test_group_torch_without_a_process_group():
    pytest.importorskip("torch")
    with pytest.raises(ferry.UsageError, match="init_process_group"):
        ferry.Group.torch()
