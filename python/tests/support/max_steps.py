"""What a step of random ids must give in MAX's call shapes, by loops over NumPy arrays."""

import numpy as np

from oracle import routes_to


def local_experts(step, rank):
    least, more = divmod(step.experts, step.ranks)
    first = rank * least + min(rank, more)
    return list(range(first, first + least + (rank < more)))


def expected_dispatch(step, rank, shared=0):
    """(output_tokens, row_offsets, expert_ids, expert_usage_stats, src_info, counts) of a rank, with alignment 1."""
    own, rows = len(step.ids[rank]), []  # (group, source rank, token, slot)
    for s in range(shared):
        rows += [(s, rank, token, step.top_k + s) for token in range(own)]
    experts = local_experts(step, rank)
    rows += [(shared + experts.index(expert), source, token, slot) for expert, source, token, slot in routes_to(step, rank)]
    counts = np.zeros((shared + len(experts), step.ranks), np.int32)
    for group, source, _, _ in rows:
        counts[group, source] += 1
    of_group = counts.sum(axis=1)
    ids = np.flatnonzero(of_group)
    hidden, dtype = step.tokens[0].shape[1], step.tokens[0].dtype
    tokens = np.array([step.tokens[source][token] for _, source, token, _ in rows], dtype).reshape(len(rows), hidden)
    return (tokens, np.concatenate([[0], np.cumsum(of_group[ids])]).astype(np.uint32), ids.astype(np.int32),
            np.array([of_group.max(initial=0), len(ids)], np.uint32),
            np.array([row[2:] for row in rows], np.int32).reshape(len(rows), 2), counts)


def outputs_of(received_rows, row_offsets, expert_ids):
    """What the tests' experts return: a row of group g times g + 1."""
    rows = np.array(received_rows)
    for begin, end, group in zip(row_offsets, row_offsets[1:], expert_ids):
        rows[begin:end] *= rows.dtype.type(group + 1)
    return rows


def expected_rows(step, rank, shared=0):
    """float32 [N, K, H]: what comes back for each slot; 0 for masked ones."""
    tokens = step.tokens[rank].astype(np.float32)
    rows = np.zeros((len(tokens), step.top_k, tokens.shape[1]), np.float32)
    for peer in range(step.ranks):
        experts = local_experts(step, peer)
        for expert, source, token, slot in routes_to(step, peer):
            if source == rank:
                rows[token, slot] = tokens[token] * np.float32(shared + experts.index(expert) + 1)
    return rows


def expected_sums(step, rank, weights, shared=0):
    """float32 [N, H]: the rows of a token in slot order, then those of the shared experts, each by a fused multiply-add."""
    rows, tokens = expected_rows(step, rank, shared), step.tokens[rank].astype(np.float32)
    sums = np.zeros(tokens.shape, np.float32)
    for slot in range(step.top_k):
        there = (step.ids[rank][:, slot] >= 0)[:, None]
        added = (rows[:, slot].astype(np.float64) * weights[:, slot, None] + sums).astype(np.float32)
        sums = np.where(there, added, sums)
    for s in range(shared):
        sums = sums + tokens * np.float32(s + 1)
    return sums
