"""For tests of Ferry as an engine's plug-in: its entry points, and inputs of one rank."""

import pathlib
import sys
import tomllib

import numpy as np
import torch

PYPROJECT = pathlib.Path(__file__).parents[3] / "pyproject.toml"


def install(folder):
    """Puts `folder` on the path, with metadata of Ferry that has the entry points of pyproject.toml; a build folder has none."""
    metadata = pathlib.Path(folder) / "ferry_ep-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ferry-ep\nVersion: 0\n")
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    (metadata / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in groups.items()))
    sys.path.insert(0, str(folder))


def inputs(rng, shape, device):
    """x, ids and weights of a rank; `shape` is (most tokens, experts, top_k, hidden)."""
    tokens, experts, top_k, hidden = shape
    count = int(rng.integers(1, tokens + 1))
    ids = rng.permuted(np.tile(np.arange(experts), (count, 1)), axis=1)[:, :top_k]
    x, weights = rng.standard_normal((count, hidden)), rng.random((count, top_k), dtype=np.float32)
    return torch.tensor(x, device=device).bfloat16(), torch.tensor(ids, device=device), torch.tensor(weights, device=device)
