# A program starts its processes itself and makes a group of them: it passes Ferry its own all-gather and barrier.
import multiprocessing

import numpy as np

import ferry

RANKS, TOKENS, HIDDEN, TOP_K = 8, 4, 8, 2


class Pipes:
    """The program's own communication: rank 0 has a pipe to every other rank."""

    def __init__(self, rank, ends):
        self.rank, self.ends = rank, ends

    def all_gather(self, mine):
        if self.rank != 0:
            self.ends[self.rank][1].send_bytes(mine)
            return self.ends[self.rank][1].recv()
        everything = [mine] + [near.recv_bytes() for near, _ in self.ends[1:]]
        for near, _ in self.ends[1:]:
            near.send(everything)
        return everything

    def barrier(self):
        self.all_gather(b"")


def process(rank, ends, lines):
    pipes = Pipes(rank, ends)
    group = ferry.Group.custom(rank, RANKS, pipes.all_gather, pipes.barrier)
    with ferry.Exchange(group, experts=16, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, format="fp32",
                        combine_type="fp32") as exchange:
        tokens = np.full((TOKENS, HIDDEN), 1 + rank, np.float32)
        ids = np.array([[0, 15], [3, 8], [7, 2], [9, 4]])  # two experts a token
        weights = np.full((TOKENS, TOP_K), 0.25, np.float32)
        rows = exchange.dispatch(tokens, ids, weights)
        outputs = rows.received_rows() * 2  # the experts
        result = exchange.combine(outputs, rows.plan, row_weights=rows.weight)
        lines.put((rank, f"rank {rank}: {rows.total} rows received, y = {result[0, 0]:g}"))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(RANKS)]
    lines = context.Queue()
    processes = [context.Process(target=process, args=(rank, ends, lines)) for rank in range(RANKS)]
    for started in processes:
        started.start()
    for _, line in sorted(lines.get() for _ in processes):
        print(line)
    for started in processes:
        started.join()
