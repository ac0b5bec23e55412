# Two ranks run an MoE layer in MAX's call shapes: six experts, one shared expert, two experts a token.
import numpy as np

import ferry
import ferry.max


def body(rank):
    exchange = ferry.max.Exchange(rank, experts=6, top_k=2, hidden=4, max_tokens=4, shared_experts=1, format="fp32",
                                  combine_type="fp32")
    x = np.ones((2, 4), np.float32) * np.array([[1], [2]], np.float32)
    topk_ids = np.array([[3, 5], [5, 0]] if rank.index == 0 else [[5, 3], [-1, 1]], np.int32)
    router_weights = np.array([[0.5, 0.25], [2, 1]], np.float32)

    received = exchange.ep_fused_dispatch(x, topk_ids)
    rows = received.output_tokens.copy()
    offsets = received.row_offsets.tolist()
    for expert, begin, end in zip(received.expert_ids, offsets, offsets[1:]):
        rows[begin:end] *= expert + 1  # the experts: a grouped GEMM over the groups that have rows

    exchange.ep_combine_async(rows, received.src_info, received.row_offsets, received.counts, router_weights=router_weights)
    # ... work that does not need the result ...
    y = exchange.ep_combine_wait()
    return f"rank {rank.index}: row_offsets {offsets}, expert_ids {received.expert_ids.tolist()}, y {y[:, 0].tolist()}"


for line in ferry.Group.threads(2).run(body):
    print(line)
