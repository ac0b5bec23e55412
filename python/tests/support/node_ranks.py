"""Ranks on simulated nodes, as threads: over shared memory, or over functions of this file as the transport of 'collective'."""

import threading

import ferry

PATIENCE = 60  # seconds until a rank that waits for one that has failed gives up


class Meeting:
    """How ranks that are threads gather bytes and exchange memory."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self.parts = [None] * ranks

    def all_gather(self, rank, mine):
        self.parts[rank] = mine
        self.barrier.wait()
        gathered = list(self.parts)
        self.barrier.wait()
        return gathered

    def all_to_all_v(self, rank, lane, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets):
        self.parts[rank] = send, send_bytes, send_offsets
        self.barrier.wait()
        for peer, (memory, sizes, offsets) in enumerate(self.parts):
            begin = receive_offsets[peer]
            receive[begin:begin + sizes[rank]] = memory[offsets[rank]:offsets[rank] + sizes[rank]]
        self.barrier.wait()


def over_functions(node_of_rank, body):
    """Calls body(rank) as every rank, on the nodes `node_of_rank`. Returns what the calls returned; raises the first error."""
    ranks = len(node_of_rank)
    meeting, transport = Meeting(ranks), Meeting(ranks)
    results, errors = [None] * ranks, []

    def run_rank(rank):
        try:
            group = ferry.Group.custom(
                rank, ranks, lambda mine: meeting.all_gather(rank, mine), lambda: meeting.all_gather(rank, b""),
                all_to_all_v=lambda *arguments: transport.all_to_all_v(rank, *arguments), abort=transport.barrier.abort,
                host_id=f"node {node_of_rank[rank]}")
            results[rank] = group.run(body)[0]
        except BaseException as error:
            errors.append(error)
            transport.barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_shared_memory(node_of_rank, body):
    nodes = 1 + max(node_of_rank)
    assert node_of_rank == [rank * nodes // len(node_of_rank) for rank in range(len(node_of_rank))]
    return ferry.Group.threads(len(node_of_rank), nodes).run(body)


TRANSPORTS = {"functions": over_functions, "shared memory": in_shared_memory}
EVEN = [("shared memory", [0, 0, 1, 1]), ("functions", [0, 0, 1, 1]), ("shared memory", [0, 0, 0, 0, 1, 1, 1, 1])]
OF_DEEP_EP = ("shared memory", [0] * 8 + [1] * 8)  # two nodes of 8 ranks
# Nodes of one rank, ranks that take turns, and nodes of different sizes.
OTHERS = [("functions", nodes) for nodes in ([0, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 1, 1, 2])]


def name_of(case):
    transport, nodes = case
    return f"{transport} {''.join(map(str, nodes))}"
