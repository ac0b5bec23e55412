# From a router to a grouped GEMM and back: four ranks, two experts each, every expert a matrix of its own.
import numpy as np

import ferry

EXPERTS, TOP_K, HIDDEN, TOKENS, ALIGNMENT = 8, 2, 16, 6, 4


def route(tokens, router):
    """Ids and weights [N, K] of the best experts of each token, the weights adding up to 1."""
    scores = tokens @ router
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    weights = np.exp(np.take_along_axis(scores, ids, 1))
    return ids, (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def body(rank):
    shape = dict(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS,
                 alignment=ALIGNMENT, format="fp32", combine_type="fp32")
    exchange = ferry.Exchange(rank, **shape)
    # Whole numbers, so that sums have no rounding; each rank has its own tokens, and as many as it likes.
    random = np.random.default_rng(rank.index)
    tokens = random.integers(-4, 5, (TOKENS - rank.index, HIDDEN)).astype(np.float32)
    router = np.random.default_rng(99).integers(-4, 5, (HIDDEN, EXPERTS)) / 16
    matrices = np.random.default_rng(7).integers(-2, 3, (EXPERTS, HIDDEN, HIDDEN)).astype(np.float32)

    ids, weights = route(tokens, router)
    rows = exchange.dispatch(tokens, ids, weights)

    # The grouped GEMM: group g holds the rows of expert group_expert[g], from row_offsets[g] on, counts[g] of
    # them. In place: row i of the outputs belongs to row i of the input, and each is read before it is written.
    outputs = rows.data
    for group, expert in enumerate(rows.group_expert):
        begin = rows.row_offsets[group]
        end = begin + rows.counts[group]
        outputs[begin:end] = rows.data[begin:end] @ matrices[expert]

    result = exchange.combine(outputs, rows.plan, row_weights=rows.weight)

    # The same with each token stored once: the grouped GEMM reads its rows by index and writes by position.
    indexed = ferry.Exchange(rank, layout="expert_indexed", **shape)
    stored = indexed.dispatch(tokens, ids, weights)
    by_position = np.empty((stored.total, HIDDEN), np.float32)
    for group, expert in enumerate(stored.group_expert):
        begin = stored.row_offsets[group]
        end = begin + stored.counts[group]
        by_position[begin:end] = stored.data[stored.index[begin:end]] @ matrices[expert]
    again = indexed.combine(by_position, stored.plan, row_weights=stored.weight)

    expected = np.zeros_like(result)
    for slot in range(TOP_K):
        expected += weights[:, slot, None] * np.einsum("nh,nhj->nj", tokens, matrices[ids[:, slot]])
    worst = np.abs(result - expected).max()
    return (f"rank {rank.index}: {len(tokens)} tokens sent, groups {rows.counts.tolist()} at rows "
            f"{rows.row_offsets.tolist()}, as a dense layer: {bool(worst < 1e-4)}; "
            f"{stored.source_offsets[-1]} tokens stored once, the same result: {np.array_equal(again, result)}")


for line in ferry.Group.threads(4).run(body):
    print(line)
