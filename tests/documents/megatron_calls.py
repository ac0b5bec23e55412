# What the calls of docs/guides/megatron.md stand in: one rank, NumPy arrays, two experts that return their rows.
import numpy as np

import ferry
import ferry.megatron


def local_experts(x, ids, weights):
    return (x * weights.sum(1, keepdims=True)).astype(x.dtype)


def body(rank):
    exchange = ferry.Exchange(rank, experts=2, top_k=2, hidden=8, max_tokens=4, format="fp32", combine_type="fp32")
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    ids, weights = np.array([[0, 1], [1, 0], [0, 1]]), np.full((3, 2), 0.5, np.float32)
    all_x, all_ids, all_weights = np.empty((4, 8), np.float32), np.empty((4, 2), np.int64), np.empty((4, 2), np.float32)
    step_metadata, y = np.empty(3, np.int32), np.empty_like(x)
    # BLOCK
    assert step_metadata.tolist() == [3, 0, 3] and np.array_equal(y, x)


ferry.Group.threads(1).run(body)
