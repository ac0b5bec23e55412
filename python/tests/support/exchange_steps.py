"""An exchange for a random step of the oracle, a rank's inputs, and memory for its outputs."""

import numpy as np

import ferry

HIDDEN, MOST = 32, 7


def exchange_for(rank, step, **settings):
    given = {"experts": step.experts, "top_k": step.top_k, "hidden": HIDDEN, "max_tokens": MOST}
    return ferry.Exchange(rank, **(given | settings))


def inputs(step, rank):
    return step.tokens[rank.index], step.ids[rank.index], step.weights[rank.index]


def poisoned(shape, dtype):
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0x7F
    return array
