# Two ranks send their tokens to one expert each, in nvFuser's call shapes, and get back what the experts return.
import numpy as np

import ferry
import ferry.nvfuser


def body(rank):
    exchange = ferry.nvfuser.Exchange(rank, experts=4, top_k=1, hidden=4, max_tokens=4, dtype="fp32")
    x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1000 * rank.index
    topk_idx = np.array([0, 2, 3, 2])

    received = exchange.dispatch(x, topk_idx)
    rows = received.recv_x * 2  # the experts
    y = exchange.combine(rows, received.recv_src_idx, received.recv_src_rank,
                         received.n_tokens_to_rank, received.n_tokens_from_rank)
    return (f"rank {rank.index}: tokens {received.recv_src_idx.tolist()} of ranks {received.recv_src_rank.tolist()} "
            f"for experts {received.recv_topk_idx.tolist()}, y == 2 x: {np.array_equal(y, 2 * x)}")


for line in ferry.Group.threads(2).run(body):
    print(line)
