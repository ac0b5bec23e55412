# What the grouped GEMM of docs/from-router-to-grouped-gemm.md stands in: one rank, a thread; two experts, each a matrix.
import numpy as np

import ferry


def body(rank):
    exchange = ferry.Exchange(rank, experts=2, top_k=2, hidden=8, max_tokens=4, alignment=4, format="fp32", combine_type="fp32")
    tokens = np.arange(32, dtype=np.float32).reshape(4, 8)
    ids = np.array([[0, 1], [1, -1], [0, -1], [1, 0]])
    weights = np.full((4, 2), 0.5, np.float32)
    matrices = np.stack([np.eye(8, dtype=np.float32) * 2, np.eye(8, dtype=np.float32) * 4])
    # BLOCK
    factor = np.where(ids < 0, 0, 2 * (ids + 1)).sum(1, keepdims=True) * np.float32(0.5)
    assert np.array_equal(result, tokens * factor), result


ferry.Group.threads(1).run(body)
