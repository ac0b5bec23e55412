"""Small exchanges and inputs for tests with PyTorch."""

import torch

import ferry
from oracle import random_ids

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 16, 6


def exchange_for(rank, **settings):
    given = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "format": "fp32", "combine_type": "fp32"}
    return ferry.Exchange(rank, **(given | settings))


def inputs_of(rng, tokens=TOKENS):
    x = torch.tensor(rng.standard_normal((tokens, HIDDEN)), dtype=torch.float32)
    return x, torch.tensor(random_ids(rng, tokens, EXPERTS, TOP_K)), torch.rand(tokens, TOP_K)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the registered operators that PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.observed = []

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        self.observed.append(str(function))
        return function(*arguments, **(settings or {}))
