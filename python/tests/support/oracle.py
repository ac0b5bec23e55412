"""The expected results of dispatch and combine, computed independently by sorting and loops over NumPy arrays."""

import dataclasses

import ml_dtypes
import numpy as np

bf16 = ml_dtypes.bfloat16
POISON = 0x7F


@dataclasses.dataclass
class Step:
    """One call of all ranks: lists by rank."""

    experts: int
    top_k: int
    tokens: list  # [N, H]
    ids: list  # [N, K]
    weights: list  # float32 [N, K]

    @property
    def ranks(self):
        return len(self.tokens)


def random_step(rng, ranks=4, experts=16, top_k=3, hidden=32, most=7, dtype=bf16, ids=np.int32):
    counts = [int(rng.integers(0, most + 1)) for _ in range(ranks)]
    return Step(
        experts,
        top_k,
        [rng.standard_normal((n, hidden)).astype(dtype) for n in counts],
        [random_ids(rng, n, experts, top_k).astype(ids) for n in counts],
        [rng.random((n, top_k), np.float32) for n in counts],
    )


def random_ids(rng, tokens, experts, top_k, masked=0.2):
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int64).reshape(tokens, top_k)
    ids[rng.random(ids.shape) < masked] = -1
    return ids


def rank_of(expert, step):
    """Blocks of neighbouring experts; the first ranks hold one more."""
    least, more = divmod(step.experts, step.ranks)
    edge = more * (least + 1)
    return expert // (least + 1) if expert < edge else more + (expert - edge) // least


def experts_of(rank, step):
    return [expert for expert in range(step.experts) if rank_of(expert, step) == rank]


def routes_to(step, rank):
    """(expert, source rank, token, slot) of every row on a rank, in the order of expert_major rows."""
    return sorted(
        (int(step.ids[source][token, slot]), source, token, slot)
        for source in range(step.ranks)
        for token, slot in np.argwhere(step.ids[source] >= 0)
        if rank_of(step.ids[source][token, slot], step) == rank
    )


def messages_to(step, rank):
    """(source rank, token) of every token with an expert on a rank: the rows of rank_major."""
    return sorted({(source, token) for _, source, token, _ in routes_to(step, rank)})


def partial_sums(step, rank, value):
    """The result of combine on a rank: fp32 sums on each rank, rounded to bf16, then added in rank order.

    `value(source, token, slot)` is the float32 row of a route. Written with exact double products, rounded once.
    """
    ids, weights = step.ids[rank], step.weights[rank]
    result = []
    for token in range(len(ids)):
        total = np.zeros(step.tokens[rank].shape[1], np.float32)
        for peer in range(step.ranks):
            slots = [k for k in range(step.top_k) if ids[token, k] >= 0 and rank_of(ids[token, k], step) == peer]
            if not slots:
                continue
            here = np.float32(0)
            for slot in slots:
                product = weights[token, slot].astype(np.float64) * value(rank, token, slot).astype(np.float64)
                here = (product + here).astype(np.float32)  # fma: one rounding
            here = here.astype(bf16).astype(np.float32)
            total = total + here
        result.append(total)
    return np.array(result, np.float32).reshape(step.tokens[rank].shape)


def same_bits(a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
