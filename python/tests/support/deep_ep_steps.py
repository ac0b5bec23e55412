"""Inputs of all ranks, and the calls that most tests of deep_ep make."""

import ml_dtypes
import numpy as np

import ferry
import ferry.deep_ep as deep_ep
from oracle import bf16, random_step

HIDDEN = 256
fp8 = ml_dtypes.float8_e4m3fn


def step_of(rng, ranks=4, most=9, ids=np.int64, experts=16, top_k=3, hidden=HIDDEN):
    return random_step(rng, ranks, experts=experts, top_k=top_k, hidden=hidden, most=most, ids=ids)


def full_step(rng, ranks=2):
    """A step with five tokens on every rank, so that a wrong number of rows is noticed."""
    step = step_of(rng, ranks, most=1)
    tokens = [rng.standard_normal((5, HIDDEN)).astype(bf16) for _ in range(ranks)]
    ids = [np.array([rng.permutation(16)[:3] for _ in range(5)]) for _ in range(ranks)]
    return type(step)(16, 3, tokens, ids, [rng.random((5, 3), np.float32) for _ in range(ranks)])


def on_ranks(ranks):
    """Runs a test's body on every rank, with a Buffer."""

    def decorate(body):
        ferry.Group.threads(ranks).run(
            lambda rank: body(rank.index, deep_ep.Buffer(rank, int(2e9), 0, explicitly_destroy=True)))
        return body

    return decorate


def layout_and_dispatch(buffer, step, me, x=None, **settings):
    ids = step.ids[me]
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, step.experts)
    given = {"topk_idx": ids, "topk_weights": step.weights[me], "num_tokens_per_expert": per_expert, "num_tokens_per_rank": per_rank,
             "num_tokens_per_rdma_rank": per_rdma, "is_token_in_rank": in_rank}
    return buffer.dispatch(step.tokens[me] if x is None else x, **(given | settings))


def low_latency(buffer, step, me, most=9, **settings):
    return buffer.low_latency_dispatch(step.tokens[me], step.ids[me], most, step.experts, **settings)


class Interrupted:
    """An array whose export is interrupted by Ctrl-C."""

    def __dlpack__(self, **_):
        raise KeyboardInterrupt
