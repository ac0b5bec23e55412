# Eight ranks send their tokens to experts that double them, and sum what returns.
import numpy as np

import ferry

TOKENS, HIDDEN, TOP_K = 4, 8, 2


def body(rank):
    exchange = ferry.Exchange(
        rank, experts=16, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, format="fp32", combine_type="fp32")
    tokens = np.full((TOKENS, HIDDEN), 1 + rank.index, np.float32)
    ids = np.array([[0, 15], [3, 8], [7, 2], [9, 4]])  # two experts a token
    weights = np.full((TOKENS, TOP_K), 0.25, np.float32)

    rows = exchange.dispatch(tokens, ids, weights)
    outputs = rows.data[: rows.total] * 2  # the experts
    result = exchange.combine(outputs, rows.plan, row_weights=rows.weight)
    return f"rank {rank.index}: {rows.total} rows received, y = {result[0, 0]:g}"


for line in ferry.Group.threads(8).run(body):
    print(line)
