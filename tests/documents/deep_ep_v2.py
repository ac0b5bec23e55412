# What the calls of docs/guides/deep_ep_v2.md stand in: one rank, NumPy arrays.
import ml_dtypes
import numpy as np

import ferry
import ferry.deep_ep as deep_ep

M, H, K, E = 8, 64, 2, 4


def body(group):
    x = np.full((M, H), 1 + group.index, ml_dtypes.bfloat16)
    topk_idx = np.array([[token % E, (token + 1) % E] for token in range(M)])
    topk_weights = np.full((M, K), 0.5, np.float32)

    outputs = np.ones((128 * E, H), ml_dtypes.bfloat16)  # every expert gets four tokens, padded to 128
    # BLOCK
    assert combined_x.shape == (M, H)


ferry.Group.threads(1).run(body)
