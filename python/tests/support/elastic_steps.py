"""What ElasticBuffer returns, computed by loops over the routes of all ranks."""

import dataclasses

import numpy as np

from oracle import bf16, messages_to, random_step, rank_of, routes_to, experts_of

POISON = 0xA5


def poisoned(shape, dtype):
    return np.frombuffer(bytes([POISON]) * (int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()


def skewed_step(rng, ranks, experts, top_k, hidden, most):
    """A random step in which some ranks have no tokens, and in every third all tokens go to the same experts."""
    step = random_step(rng, ranks, experts, top_k, hidden, most, ids=[np.int32, np.int64][rng.integers(2)])
    same = rng.permutation(experts)[:top_k]
    for rank in range(ranks):
        if rng.random() < 0.25:
            for arrays in (step.tokens, step.ids, step.weights):
                arrays[rank] = arrays[rank][:0]
        if rng.integers(3) == 0:
            step.ids[rank][...] = same
    return step


@dataclasses.dataclass
class Expected:
    """rows: (source rank, token, slot) of each received row, slot -1 without expanding, None on padding. counts: rows of each
    expert; ends: psum_num_recv_tokens_per_expert."""

    rows: list
    counts: list
    aligned: list
    ends: list


def expected_of(step, me, expand, alignment):
    mine = experts_of(me, step)
    routes = routes_to(step, me)
    counts = [sum(route[0] == expert for route in routes) for expert in mine]
    aligned = [-(-count // alignment) * alignment for count in counts]
    rows, ends = [], []
    for expert, count, room in zip(mine, counts, aligned):
        if expand:
            rows += [route[1:] for route in routes if route[0] == expert]
            ends.append(len(rows))
            rows += [None] * (room - count)
        else:
            ends.append((ends[-1] if ends else 0) + room)
    if not expand:
        rows = [(source, token, -1) for source, token in messages_to(step, me)]
    return Expected(rows, counts, aligned, ends)


def expected_metadata(step, me, expand, most, rows):
    """recv_src_metadata, its column 1 left out."""
    table = []
    for source, token in messages_to(step, me):
        slots = [rows.index((source, token, slot)) if expand and (source, token, slot) in rows else -1 for slot in range(step.top_k)]
        table.append([source * most + token, *slots])
    return table


def outputs_of(step, rng, expand):
    """The experts' outputs, the same on all ranks: bfloat16 [H] of a (source, token) and a rank, or with expanding a slot."""
    return {(source, token, key): rng.standard_normal(step.tokens[source].shape[1]).astype(bf16)
            for source in range(step.ranks) for token in range(len(step.ids[source]))
            for key in range(step.top_k if expand else step.ranks)}


def expected_sum(step, me, outputs, expand, exact, biases, node_of_rank=()):
    """combined_x: fp32 sums on each rank, rounded to bfloat16, then over the ranks of a node, then over nodes; or at once.

    node_of_rank: empty to leave out the sums of nodes.
    """
    nodes = list(dict.fromkeys(node_of_rank))  # by their lowest ranks
    result = []
    for token, ids in enumerate(step.ids[me].tolist()):
        used = [(rank_of(i, step), slot) for slot, i in enumerate(ids) if i >= 0]
        zero = np.zeros(step.tokens[me].shape[1], np.float32)
        of_rank = {}
        for rank in sorted({rank for rank, _ in used}):
            slots = [slot for r, slot in used if r == rank]
            of_rank[rank] = sum((outputs[me, token, s].astype(np.float32) for s in slots), zero) if expand else (
                outputs[me, token, rank].astype(np.float32))
        if expand and exact:
            total = sum((outputs[me, token, slot].astype(np.float32) for _, slot in used), zero)
        else:
            parts = {rank: part.astype(bf16).astype(np.float32) for rank, part in of_rank.items()}
            if node_of_rank:
                of_node = [[part for rank, part in parts.items() if node_of_rank[rank] == node] for node in nodes]
                parts = dict(enumerate(sum(mine, zero).astype(bf16).astype(np.float32) for mine in of_node if mine))
            total = sum(parts.values(), zero)
        for bias in biases:
            total = total + bias[token].astype(np.float32)
        result.append(total)
    return np.array(result, np.float32).reshape(step.tokens[me].shape).astype(bf16)
