# What the calls of docs/guides/nvfuser.md stand in: one rank, a thread.
import numpy as np

import ferry
import ferry.nvfuser


def body(rank):
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    topk_idx = np.array([0, 2, 3, 2])
    # BLOCK
    assert received.recv_topk_idx.tolist() == [0, 2, 2, 3] and np.array_equal(y, 2 * x)


ferry.Group.threads(1).run(body)
