# Four ranks with 3, 0, 5 and 1 tokens run one MoE layer as Megatron's inference dispatcher does: they gather all tokens,
# each runs its own experts, and the outputs are added. Then the same layer by dispatch and combine, which send less.
import numpy as np

import ferry
import ferry.megatron

COUNTS, EXPERTS, TOP_K, HIDDEN, MOST = [3, 0, 5, 1], 8, 2, 16, 8


def expert(e, rows):
    return rows * np.float32(e + 1)


def body(rank):
    exchange = ferry.Exchange(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, format="fp32",
                              combine_type="fp32")
    n = COUNTS[rank.index]
    x = np.arange(n * HIDDEN, dtype=np.float32).reshape(n, HIDDEN) + 100 * rank.index
    ids = (np.arange(n)[:, None] + np.array([rank.index, rank.index + 3])) % EXPERTS
    weights = np.tile(np.array([0.75, 0.25], np.float32), (n, 1))

    # Once a step: how many tokens there are, where this rank's begin, and the largest count.
    step = np.empty(3, np.int32)
    ferry.megatron.fused_metadata_update(local_tokens=n, local_buf=None, symm_mem_hdl=exchange, step_metadata=step)

    # A layer: buffers for the most tokens of all ranks; the rows past the sum are not written.
    room = MOST * rank.size
    all_x = exchange.all_gather_v(x, np.empty((room, HIDDEN), np.float32))
    all_ids = exchange.all_gather_v(ids, np.empty((room, TOP_K), ids.dtype))
    all_weights = exchange.all_gather_v(weights, np.empty((room, TOP_K), np.float32))
    outputs = np.zeros((step[0], HIDDEN), np.float32)
    for e in range(rank.index * 2, rank.index * 2 + 2):  # two experts a rank
        for slot in range(TOP_K):
            token = np.flatnonzero(all_ids[:step[0], slot] == e)
            outputs[token] += all_weights[token, slot, None] * expert(e, all_x[token])
    y = exchange.reduce_scatter_v(outputs, np.empty_like(x))

    # The same layer by routing: only the rows of its own experts reach a rank.
    received = exchange.dispatch(x, ids, weights)
    rows = np.empty((received.wait_total(), HIDDEN), np.float32)
    for e, begin, count in zip(received.group_expert, received.row_offsets, received.counts):
        rows[begin:begin + count] = expert(e, received.data[begin:begin + count])
    routed = exchange.combine(rows, received.plan, row_weights=received.weight, result=np.empty_like(x))
    return f"rank {rank.index}: {n} tokens, metadata {step.tolist()}, same result by routing: {np.array_equal(y, routed)}"


for line in ferry.Group.threads(4).run(body):
    print(line)
