"""An exchange for a random step of the oracle, and a rank's inputs."""

import ferry

HIDDEN, MOST = 32, 7


def exchange_for(rank, step, **settings):
    given = {"experts": step.experts, "top_k": step.top_k, "hidden": HIDDEN, "max_tokens": MOST}
    return ferry.Exchange(rank, **(given | settings))


def inputs(step, rank):
    return step.tokens[rank.index], step.ids[rank.index], step.weights[rank.index]
