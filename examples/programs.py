# A layer as a program: dispatch, experts and combine for top-1, and a block with a shared expert in two micro-batches.
import numpy as np

import ferry

TOP_1 = ferry.Program("""
    program top_1
    input x: tokens
    input ids: ids
    rows = dispatch(x, ids)
    outputs: outputs = call experts(rows)
    y = combine(outputs, rows)
    output y
""")

BLOCK = ferry.Program("""
    program block
    input x: tokens
    ids: ids, gates: weights = call router(x)
    rows = dispatch(x, ids, gates)
    outputs: outputs = call experts(rows)
    y = combine(outputs, rows, rows)
    z: tokens = call add(x, y)
    output z
""")


def top_1(rank):
    exchange = ferry.Exchange(rank, experts=4, top_k=1, hidden=4, max_tokens=4, format="fp32", combine_type="fp32")
    layer = ferry.Evaluator(TOP_1, exchange, {"experts": lambda rows: rows.data[:rows.total] * 2})
    x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1000 * rank.index
    (y,) = layer.run(x, np.array([[0], [2], [3], [2]]))
    return f"rank {rank.index}: top-1, y == 2 x: {np.array_equal(y, 2 * x)}"


def router(x):  # two of four experts a token
    scores = np.stack([(x * np.cos(np.arange(x.shape[1]) * (expert + 1))).sum(axis=1) for expert in range(4)], axis=1)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    return ids, (1 / (1 + np.exp(-np.take_along_axis(scores, ids, axis=1)))).astype(np.float32)


def experts(rows):  # the shared expert's rows come first, as expert 4
    expert = np.repeat(rows.group_expert, np.diff(rows.row_offsets))[:, None]
    return np.tanh(rows.data[:rows.total] * (expert + 1)).astype(np.float32)


def block(rank):
    settings = {"experts": 4, "top_k": 2, "shared_experts": 1, "hidden": 8, "max_tokens": 7, "format": "fp32", "combine_type": "fp32"}
    functions = {"router": router, "experts": experts, "add": lambda x, y: x + y}
    plain = ferry.Evaluator(BLOCK, ferry.Exchange(rank, **settings), functions)
    batched = ferry.Evaluator(BLOCK.overlap(2), ferry.Exchange(rank, lanes=2, **settings), functions)
    x = np.random.default_rng(rank.index).standard_normal((7, 8), dtype=np.float32)
    (z,), (z2,) = plain.run(x), batched.run(x)
    return f"rank {rank.index}: block, two micro-batches make the same bytes: {z.tobytes() == z2.tobytes()}"


for body in (top_1, block):
    for line in ferry.Group.threads(2).run(body):
        print(line)
