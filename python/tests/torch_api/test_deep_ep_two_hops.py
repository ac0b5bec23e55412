"""ferry.deep_ep between simulated nodes that share GPUs: kernels carry the rows in two hops."""

import os
import pathlib
import subprocess
import sys

import pytest

SUPPORT = pathlib.Path(__file__).parents[1] / "support"


# Processes that share a GPU take turns on it, so few tokens and few ranks.
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs a GPU")
@pytest.mark.parametrize("nodes", ["01", "0011", "011"])
def test_all_calls_in_two_hops(rng, nodes):
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, str(SUPPORT / "two_hop_ranks.py"), nodes, str(rng.integers(1 << 31))], text=True,
                         capture_output=True, timeout=90)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "every call returned what it should" in run.stdout
