# What the calls of docs/guides/max.md stand in: one rank, a thread; three experts that multiply by 1, 2 and 3.
import numpy as np

import ferry
import ferry.max


def grouped_gemm(tokens, row_offsets, expert_ids):
    rows, offsets = tokens.copy(), row_offsets.tolist()
    for expert, begin, end in zip(expert_ids, offsets, offsets[1:]):
        rows[begin:end] *= expert + 1
    return rows


def body(rank):
    exchange = ferry.max.Exchange(rank, experts=3, top_k=2, hidden=4, max_tokens=2, format="fp32", combine_type="fp32")
    x = np.ones((2, 4), np.float32)
    topk_ids = np.array([[0, 2], [2, -1]], np.int32)
    router_weights = np.array([[0.5, 0.25], [2, 1]], np.float32)
    # BLOCK
    assert received.expert_ids.tolist() == [0, 2] and y[:, 0].tolist() == [1.25, 6.0], y


ferry.Group.threads(1).run(body)
