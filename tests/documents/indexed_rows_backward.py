# What the backward pass of docs/from-router-to-grouped-gemm.md stands in: two ranks, threads; four experts, each a matrix.
import numpy as np

import ferry


def grouped_gemm(inputs, rows, matrices):
    outputs = np.zeros((rows.total, matrices.shape[2]), np.float32)
    for group, expert in enumerate(rows.group_expert):
        begin = rows.row_offsets[group]
        end = begin + rows.counts[group]
        outputs[begin:end] = inputs[begin:end] @ matrices[expert]
    return outputs


def body(rank):
    shape = dict(experts=4, top_k=3, hidden=8, max_tokens=4, alignment=4, format="fp32", combine_type="fp32")
    random = np.random.default_rng(rank.index)
    tokens, dy = random.integers(-4, 5, (2, 4 - rank.index, 8)).astype(np.float32)  # whole numbers, so that sums have no rounding
    ids = np.argsort(random.random((len(tokens), 4)), axis=1)[:, :3]
    weights = random.integers(1, 4, ids.shape).astype(np.float32)
    matrices = np.random.default_rng(7).integers(-2, 3, (4, 8, 8)).astype(np.float32)
    rows = ferry.Exchange(rank, layout="expert_indexed", **shape).dispatch(tokens, ids, weights)
    outputs = grouped_gemm(rows.data[np.minimum(rows.index[:rows.total], len(rows.data) - 1)], rows, matrices)
    # BLOCK
    assert np.array_equal(dx, np.einsum("nk,nj,nkhj->nh", weights, dy, matrices[ids]))
    assert np.array_equal(d_weights, np.einsum("nh,nj,nkhj->nk", tokens, dy, matrices[ids]))


ferry.Group.threads(2).run(body)
