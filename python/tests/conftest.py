"""Every test draws its inputs from a seed that it prints; FERRY_SEED=<seed> repeats a run."""

import os
import secrets

import numpy as np
import pytest


@pytest.fixture
def rng(request):
    seed = int(os.environ.get("FERRY_SEED") or secrets.randbits(31))
    print(f"FERRY_SEED={seed}")
    return np.random.default_rng(seed)
