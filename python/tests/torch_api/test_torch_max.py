"""ferry.max with tensors in host memory."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np

import ferry
import ferry.max
from max_steps import expected_dispatch, expected_sums, outputs_of
from oracle import random_step


def test_tensors_give_the_results_of_arrays(rng):
    step = random_step(rng, 3, experts=7, top_k=2, hidden=24, most=9, dtype=np.float32, ids=np.int64)

    def body(rank):
        me = rank.index
        exchange = ferry.max.Exchange(rank, experts=7, top_k=2, hidden=24, max_tokens=9, shared_experts=1, format="fp32",
                                      combine_type="fp32")
        exchange.ep_dispatch_async(torch.from_numpy(step.tokens[me]), torch.from_numpy(step.ids[me]))
        received = exchange.ep_dispatch_wait()
        got = [received.output_tokens, *received[2:]]
        assert all(isinstance(array, torch.Tensor) for array in got)
        for array, expected in zip(got, expected_dispatch(step, me, 1)):
            assert array.numpy().dtype == expected.dtype and np.array_equal(array.numpy(), expected)
        rows = torch.from_numpy(outputs_of(received.output_tokens.numpy(), received.row_offsets.tolist(),
                                           received.expert_ids.tolist()))
        exchange.ep_combine_async(rows, received.src_info, received.row_offsets, received.counts,
                                  router_weights=torch.from_numpy(step.weights[me]))
        y = exchange.ep_combine_wait()
        assert np.array_equal(y.numpy(), expected_sums(step, me, step.weights[me], 1))
        with pytest.raises(ferry.UsageError, match=r"rank 1: counts: int64 \[\d, 3\], must be int32"):
            counts = received.counts.to(torch.int64) if me == 1 else received.counts
            exchange.ep_fused_combine(rows, received.src_info, received.row_offsets, counts)

    ferry.Group.threads(3).run(body)
