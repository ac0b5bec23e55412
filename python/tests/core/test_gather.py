"""all_gather_v, reduce_scatter_v and gathered input, and Megatron's metadata call over metadata()."""

import re

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.megatron
from exchange_steps import poisoned

COUNTS = [3, 0, 5, 1]
HIDDEN = 24
TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def exchange_of(rank):
    return ferry.Exchange(rank, experts=8, top_k=2, hidden=HIDDEN, max_tokens=4)


def random_rows(rng, ranks, rows, dtype):
    """Numbers of different magnitudes: another order of additions gives other bits."""
    return [(rng.standard_normal((rows, HIDDEN)) * 2.0 ** rng.integers(-10, 10, (rows, HIDDEN))).astype(dtype)
            for _ in range(ranks)]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_gathered_rows_are_the_concatenation(rng, shape):
    for dtype in (np.int64, np.uint8, ml_dtypes.bfloat16):
        rows = [rng.integers(0, 100, (count, *shape)).astype(dtype) for count in COUNTS]

        def body(rank):
            out = poisoned((11, *shape), dtype)
            past = out[9:].copy()
            made = exchange_of(rank).all_gather_v(rows[rank.index], out)
            assert len(made) == 9 and np.shares_memory(made, out)
            assert out[:9].tobytes() == np.concatenate(rows).tobytes()
            assert out[9:].tobytes() == past.tobytes()

        ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("dtype", TYPES)
def test_scattered_sums_are_added_in_rank_order_and_rounded_once(rng, dtype):
    rows = random_rows(rng, 4, sum(COUNTS), dtype)
    sums = np.zeros((sum(COUNTS), HIDDEN), np.float32)
    for mine in rows:
        sums += mine.astype(np.float32)
    expected = np.split(sums.astype(dtype), np.cumsum(COUNTS)[:-1])

    def body(rank):
        out = poisoned((COUNTS[rank.index], HIDDEN), dtype)
        assert exchange_of(rank).reduce_scatter_v(rows[rank.index], out) is out
        assert out.tobytes() == expected[rank.index].tobytes()

    ferry.Group.threads(4).run(body)


def test_bad_arguments_end_the_call_of_every_rank_and_write_nothing():
    def body(rank):
        exchange, odd = exchange_of(rank), rank.index == 1
        rows, out = np.ones((2, HIDDEN), np.float32), poisoned((6, HIDDEN), np.float32)
        before = out.tobytes()

        def refused(call, mine, words, said="rank 1 refused .*"):
            with pytest.raises(ferry.UsageError, match=words if odd else said + words):
                call(*mine)
            assert out.tobytes() == before

        gather, scatter = exchange.all_gather_v, exchange.reduce_scatter_v
        refused(gather, (rows, out[:5] if odd else out), "room for 5 rows on rank 1, but all ranks together have 6", "")
        refused(gather, (rows[:, ::2] if odd else rows, out), "rows: expected a C-contiguous array")
        refused(gather, (np.array(1, np.float32) if odd else rows, out), "rows: expected an array of rows, got a scalar")
        refused(gather, (rows.astype(np.int32) if odd else rows, out), "out: has rows of 96 bytes of float32, but `rows` has "
                                                                      "rows of 96 bytes of int32")
        refused(gather, (rows, "none" if odd else out), "out: ")
        whole, mine = np.ones((6, HIDDEN), np.float32), out[:2]
        refused(scatter, (whole[:5] if odd else whole, mine), "rank 1 passes 5 rows, but the ranks' counts add up to 6", "")
        refused(scatter, (whole.astype(np.int32) if odd else whole, mine), "rows: expected bfloat16, float16 or float32, got int32")
        refused(scatter, (whole[:, :8].copy() if odd else whole, mine), "rows: expected rows of 24 columns, got rows of 8")
        frozen = mine[:]
        frozen.flags.writeable = not odd
        refused(scatter, (whole, frozen), "out: is read-only")
        if odd:
            exchange.refuse("not now", operation="reduce_scatter_v")
        else:
            refused(scatter, (whole, mine), "not now")
        assert scatter(whole, mine).tolist() == np.full((2, HIDDEN), 3.0).tolist()

    ferry.Group.threads(3).run(body)


def test_counts_in_arrays_are_for_device_memory():
    def body(rank):
        exchange, rows, two = exchange_of(rank), np.ones((3, HIDDEN), np.float32), np.array([2], np.int32)
        for call in (lambda count: exchange.all_gather_v(rows, np.empty_like(rows), count=count),
                     lambda count: exchange.reduce_scatter_v(rows, rows.copy(), count=count),
                     lambda count: exchange.dispatch(rows, np.zeros((3, 2), np.int32), count=count)):
            with pytest.raises(ferry.UnsupportedError, match="count: the exchange has host memory, where .* pass"):
                call(two)

    ferry.Group.threads(1).run(body)


def test_megatrons_metadata():
    def body(rank):
        exchange = exchange_of(rank)
        step = np.full(3, -7, np.int32)
        assert ferry.megatron.fused_metadata_update(
            local_tokens=COUNTS[rank.index], local_buf=None, symm_mem_hdl=exchange, step_metadata=step) is None
        assert step.tolist() == [9, [0, 3, 3, 8][rank.index], 5]
        odd = rank.index == 2
        wrong = np.full(4 if odd else 3, -7, np.int32)
        with pytest.raises(ferry.UsageError, match=r"step_metadata: expected an array of shape \[3\]"):
            ferry.megatron.fused_metadata_update(1, None, exchange, wrong)
        assert set(wrong.tolist()) == {-7}
        with pytest.raises(ferry.UsageError, match="step_metadata: None, must be an int32 array"):
            ferry.megatron.fused_metadata_update(1, None, exchange, None if odd else step)
        with pytest.raises(ferry.UsageError, match=r"count: 2147483648, must be 0 to 2147483647"):
            exchange.metadata(2**31 if odd else 1)
        ferry.megatron.fused_metadata_update(np.array([COUNTS[rank.index]], np.int32), None, exchange, step)
        assert step.tolist() == [9, [0, 3, 3, 8][rank.index], 5]
        for local_tokens, pattern in ((np.array([2], np.int64), "local_tokens: expected int32, got int64"),
                                      (np.array([2, 2], np.int32), r"local_tokens: expected an array of shape \[1\]"),
                                      (np.array([-1], np.int32), "fused_metadata_update: local_tokens = -1 on rank 2, must be 0 to "),
                                      (2**31, "local_tokens: 2147483648, must be 0 to 2147483647"),
                                      (-1, "local_tokens: -1, must be 0 to 2147483647"),
                                      (2**31 - 1, "fused_metadata_update: local_tokens = 2147483647 on rank 2, must be 0 to "),
                                      ("3", "local_tokens: ")):
            with pytest.raises(ferry.UsageError, match=pattern) as caught:
                ferry.megatron.fused_metadata_update(local_tokens if odd else 1, None, exchange, step)
            assert not re.search(r"\b(count|out|metadata): |device memory", str(caught.value))
        assert step.tolist() == [9, [0, 3, 3, 8][rank.index], 5]
        with pytest.raises(ferry.UsageError, match="symm_mem_hdl: a str, must be the ferry.Exchange"):
            ferry.megatron.fused_metadata_update(1, None, "handle", step)

    ferry.Group.threads(4).run(body)


def test_expert_outputs_by_gather_and_scatter_equal_dispatch_and_combine(rng):
    """Megatron's dispatcher by hand: gather, local experts, scatter. The bytes are those of `partial`."""
    experts, top_k = 8, 2
    tokens = [rng.integers(-8, 9, (count, HIDDEN)).astype(np.float32) for count in COUNTS]
    ids = [np.stack([rng.permutation(experts)[:top_k] for _ in range(count)]).astype(np.int64) if count else
           np.zeros((0, top_k), np.int64) for count in COUNTS]

    def body(rank):
        exchange = ferry.Exchange(rank, experts=experts, top_k=top_k, hidden=HIDDEN, max_tokens=5, format="fp32",
                                  combine_type="fp32")
        x, chosen = tokens[rank.index], ids[rank.index]
        all_x, all_ids = np.empty((9, HIDDEN), np.float32), np.empty((9, top_k), np.int64)
        exchange.all_gather_v(x, all_x)
        exchange.all_gather_v(chosen, all_ids)
        mine = (all_ids // 2 == rank.index) * (all_ids + 1.0)  # expert e multiplies by e + 1
        y = exchange.reduce_scatter_v((all_x * mine.sum(1, keepdims=True)).astype(np.float32), np.empty_like(x))

        rows = exchange.dispatch(x, chosen)
        scale = np.repeat(rows.group_expert + 1, rows.counts).astype(np.float32)
        total = rows.wait_total()
        assert exchange.combine(rows.data[:total] * scale[:, None], rows.plan, result=np.empty_like(x)).tobytes() == y.tobytes()

    ferry.Group.threads(4).run(body)


def test_gathered_input_has_the_bytes_of_routed_input(rng):
    tokens = [rng.standard_normal((count, HIDDEN)).astype(ml_dtypes.bfloat16) for count in COUNTS]
    ids = [rng.integers(-1, 8, (count, 2)) for count in COUNTS]
    weights = [rng.random((count, 2), np.float32) for count in COUNTS]

    def body(rank):
        results = []
        for transfer in ("routed", "gather"):
            exchange = ferry.Exchange(rank, experts=8, top_k=2, hidden=HIDDEN, max_tokens=5,
                                      reduction_level="rank", repeats=True, transfer=transfer)
            assert exchange.config.transfer == transfer
            rows = exchange.dispatch(tokens[rank.index], ids[rank.index], weights[rank.index])
            total = rows.wait_total()
            y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
            results.append((total, rows.data[:total].tobytes(), rows.source[:total].tobytes(), y.tobytes()))
        assert results[0] == results[1]
        assert exchange.wire_counts().dispatch_messages == 3 * COUNTS[rank.index]
        with pytest.raises(ferry.UsageError, match="transfer = gather with layout rank_major"):
            ferry.Exchange(rank, experts=8, top_k=2, hidden=HIDDEN, max_tokens=5, transfer="gather",
                           layout="rank_major")

    ferry.Group.threads(4).run(body)
