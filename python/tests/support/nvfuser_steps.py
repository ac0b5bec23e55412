"""The case of nvFuser's own test, and what a step of random ids must give, by loops over NumPy arrays."""

import numpy as np

from oracle import rank_of

# By rank: recv_topk_idx, recv_src_idx, recv_src_rank, n_tokens_to_rank, n_tokens_from_rank.
CASE_IDS = np.array([0, 2, 3, 2])
CASE = (
    ([0, 0], [0, 0], [0, 1], [1, 3], [1, 1]),
    ([2, 2, 2, 2, 3, 3], [1, 3, 1, 3, 2, 2], [0, 0, 1, 1, 0, 1], [1, 3], [3, 3]),
)


def case_tokens(rank):
    return np.arange(16, dtype=np.float32).reshape(4, 4) + 1000 * rank


def local_expert(expert, step):
    return sum(rank_of(other, step) == rank_of(expert, step) for other in range(expert))


def expected_dispatch(step, rank):
    """(recv_x, recv_topk_idx, recv_src_idx, recv_src_rank, n_tokens_to_rank, n_tokens_from_rank) of a rank."""
    between = np.zeros((step.ranks, step.ranks), np.int64)
    rows = []  # (sort key, topk_idx, source rank, token)
    for source in range(step.ranks):
        for token, ids in enumerate(step.ids[source].tolist()):
            ranks = {rank_of(expert, step) for expert in ids if expert >= 0}
            for target in ranks:
                between[source, target] += 1
            if rank not in ranks:
                continue
            mine = [local_expert(e, step) if e >= 0 and rank_of(e, step) == rank else -1 for e in ids]
            rows.append((ids[0], ids[0], source, token) if step.top_k == 1 else (0, mine, source, token))
    rows.sort(key=lambda row: (row[0], row[2], row[3]))
    tokens = [step.tokens[source][token] for *_, source, token in rows]
    shape = (len(rows),) if step.top_k == 1 else (len(rows), step.top_k)
    return (np.array(tokens, step.tokens[0].dtype).reshape(len(rows), step.tokens[0].shape[1]), np.array([row[1] for row in rows], np.int64).reshape(shape),
            np.array([row[3] for row in rows], np.int64), np.array([row[2] for row in rows], np.int64), between[rank], between[:, rank])


def output_of(row, rank):
    """What the tests' experts of a rank return for a received row."""
    return (row.astype(np.float32) * np.float32(rank + 0.3)).astype(row.dtype)


def expected_combine(step, rank):
    result = np.zeros(step.tokens[rank].shape, np.float32)
    for token, ids in enumerate(step.ids[rank].tolist()):
        for target in sorted({rank_of(expert, step) for expert in ids if expert >= 0}):
            result[token] += output_of(step.tokens[rank][token], target).astype(np.float32)
    return result.astype(step.tokens[rank].dtype)
