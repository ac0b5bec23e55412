# What the two dispatches of docs/guides/training.md stand in: one rank, a thread.
import ml_dtypes
import numpy as np

import ferry


def body(rank):
    exchange = ferry.Exchange(rank, experts=4, top_k=2, hidden=128, max_tokens=4, format="bf16")
    x = dy = np.ones((4, 128), ml_dtypes.bfloat16)
    ids, weights = np.arange(8).reshape(4, 2) % 4, np.full((4, 2), 0.5, np.float32)
    # BLOCK
    assert d_rows.total == rows.total


ferry.Group.threads(1).run(body)
