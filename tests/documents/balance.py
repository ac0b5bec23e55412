# What the call of docs/guides/balance.md stands in: loads of 3 layers with 256 experts.
import numpy as np

import ferry

loads = np.random.default_rng(1).integers(0, 1000, (3, 256))
# BLOCK
assert len(placements) == 3
