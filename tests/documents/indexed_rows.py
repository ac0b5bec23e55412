# What the gathered grouped GEMM of docs/from-router-to-grouped-gemm.md stands in: two ranks, threads; four experts, each a matrix.
import numpy as np

import ferry


def body(rank):
    shape = dict(experts=4, top_k=3, hidden=8, max_tokens=4, alignment=4, format="fp32", combine_type="fp32")
    random = np.random.default_rng(rank.index)
    tokens = random.integers(-4, 5, (4 - rank.index, 8)).astype(np.float32)  # whole numbers, so that sums have no rounding
    ids = np.argsort(random.random((len(tokens), 4)), axis=1)[:, :3]
    weights = random.integers(1, 4, ids.shape).astype(np.float32)
    matrices = np.random.default_rng(7).integers(-2, 3, (4, 8, 8)).astype(np.float32)
    # BLOCK
    expected = np.einsum("nk,nh,nkhj->nj", weights, tokens, matrices[ids])
    assert np.array_equal(result, expected), (result, expected)
    assert (rows.index < len(rows.data))[:rows.total].sum() == rows.counts.sum()
    assert rows.block_group[0] == 0 and (rows.block_group[rows.total // 4:] == -1).all()


ferry.Group.threads(2).run(body)
