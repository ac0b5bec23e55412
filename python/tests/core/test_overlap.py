"""Arrays of a call that share memory: refused on every rank, apart from calls that work in place."""

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.deep_ep
import ferry.max

X = np.array([[1] * 16, [2] * 16], np.float32)
IDS = np.array([[1], [0]], np.int32)
REFUSED = "which the call writes, overlaps"


def exchange_of(rank, **settings):
    return ferry.Exchange(rank, **({"experts": 2, "top_k": 1, "hidden": 16, "max_tokens": 4, "format": "fp32",
                                    "combine_type": "fp32"} | settings))


def refused(call, *names):
    with pytest.raises(ferry.UsageError, match=REFUSED) as caught:
        call()
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize("reduction", ["partial", "exact"])
@pytest.mark.parametrize("split", [False, True])
def test_a_result_may_be_its_residual(reduction, split):
    def body(rank):
        exchange, x = exchange_of(rank, reduction=reduction), X.copy()
        for _ in range(2):
            rows, before = exchange.dispatch(x, IDS), x.copy()
            if split:
                exchange.combine_send(rows.data * 3, rows.plan, residual=x, result=x)
                exchange.combine_receive()
            else:
                exchange.combine(rows.data * 3, rows.plan, residual=x, result=x)
            assert np.array_equal(x, 4 * before)

    ferry.Group.threads(2).run(body)


def test_other_arrays_of_a_combine_are_refused():
    def body(rank):
        exchange, odd = exchange_of(rank, shared_experts=1), rank.index == 1
        rows = exchange.dispatch(X, IDS, np.ones((2, 1), np.float32))
        total = rows.data.shape[0]
        memory, result = np.zeros((total + 4, 16), np.float32), np.zeros((2, 16), np.float32)
        outputs = memory[:total]
        # By one row, or all of it.
        for wrong in (outputs[:2], memory[total - 1 : total + 1]):
            refused(lambda: exchange.combine(outputs, rows.plan, result=wrong if odd else result), "result (", "outputs (",
                    "on rank 1")
        refused(lambda: exchange.combine(outputs, rows.plan, result=result,
                                         shared_outputs=result[None] if odd else np.zeros((1, 2, 16), np.float32)), "shared_outputs (")
        refused(lambda: exchange.combine(outputs, rows.plan, result=memory[total : total + 2],
                                         residual=memory[total + 1 : total + 3] if odd else result), "residual (")
        weights = result.reshape(-1)[:total]
        refused(lambda: exchange.combine(outputs, rows.plan, result=result, row_weights=weights if odd else rows.weight),
                "row_weights (")
        assert np.array_equal(exchange.combine(rows.data, rows.plan, result=memory[:2]), 2 * X)

    ferry.Group.threads(2).run(body)


def test_columns_of_one_matrix_are_not_refused():
    def body(rank):
        exchange, matrix = exchange_of(rank), np.zeros((2, 48), np.float32)
        matrix[:, :16] = X
        rows = exchange.dispatch(matrix[:, :16], IDS)
        matrix[:, 16:32] = rows.data[:2]
        exchange.combine(matrix[:, 16:32], rows.plan, residual=matrix[:, :16], result=matrix[:, 32:])
        assert np.array_equal(matrix[:, 32:], 2 * X)

    ferry.Group.threads(1).run(body)


def test_a_dispatch_of_its_own_received_rows_is_refused():
    def body(rank):
        exchange, odd = exchange_of(rank), rank.index == 1
        weights = np.ones((2, 1), np.float32)
        rows = exchange.dispatch(X, IDS, weights)
        refused(lambda: exchange.dispatch(rows.data[:2] if odd else X, IDS, weights), "the lane's received rows (", "on rank 1")
        refused(lambda: exchange.dispatch(X, IDS, rows.weight[:2].reshape(2, 1) if odd else weights), "the lane's weight (")
        tokens = np.zeros((exchange.capacity, 16), np.float32)
        memory = ferry.ReceiveBuffers([tokens])
        refused(lambda: exchange.dispatch(tokens[:2] if odd else X, IDS, weights, memory=memory), "memory.parts[0] (", "tokens (")
        # In memory of its own it may be.
        again = exchange.dispatch(exchange.dispatch(X, IDS).data[:2], IDS, memory=memory)
        assert again.data[: again.wait_total(), 0].tolist() == [2, 1]

    ferry.Group.threads(2).run(body)


def test_rows_of_a_gather_may_lie_at_their_place():
    def body(rank):
        exchange, me = exchange_of(rank), rank.index
        out = np.zeros((4, 16), np.float32)
        out[2 * me : 2 * me + 2] = X + me
        exchange.all_gather_v(out[2 * me : 2 * me + 2], out)
        assert np.array_equal(out, np.concatenate([X, X + 1]))
        whole = out.copy()
        exchange.reduce_scatter_v(whole, whole[2 * me : 2 * me + 2])
        out[2 * me : 2 * me + 2] *= 2
        assert np.array_equal(whole, out)
        with pytest.raises(ferry.UsageError, match="rows of rank 1 lie at row 1 of its gathered"):
            exchange.all_gather_v(out[1:3] if me == 1 else out[:2], out)
        with pytest.raises(ferry.UsageError, match="sums of rank 1 lie at row 1 of its rows"):
            exchange.reduce_scatter_v(out, out[1:3] if me == 1 else out[:2])
        refused(lambda: exchange.all_gather_v(out.reshape(-1)[8:40].reshape(2, 16) if me == 1 else X, out), "gathered (", "rows (")

    ferry.Group.threads(2).run(body)


def test_combines_by_source():
    def body(rank):
        exchange = ferry.max.Exchange(rank, experts=2, top_k=1, hidden=16, max_tokens=4, format="fp32", combine_type="fp32")
        odd, x = rank.index == 1, X.copy()
        rows = exchange.ep_fused_dispatch(x, IDS)

        def combine(outputs, **options):
            return exchange.ep_fused_combine(outputs, rows.src_info, rows.row_offsets, rows.counts, **options)

        combine(rows.output_tokens * 3, residual=x, output_tokens=x)
        assert np.array_equal(x, 4 * X)
        outputs = rows.output_tokens.copy()
        memory = np.concatenate([outputs, x])
        refused(lambda: combine(memory[: len(outputs)], output_tokens=memory[len(outputs) - 1 : len(outputs) + 1] if odd else x),
                "output_tokens (", "input_tokens (")
        refused(lambda: exchange.ep_fused_dispatch(rows.output_tokens[:2] if odd else X, IDS), "input_tokens (",
                "copy it out of the lane's memory first")
        inside = np.zeros((2, 16), np.float32)
        source = inside.reshape(-1)[: 2 * len(outputs)].view(np.int32).reshape(-1, 2)
        source[:] = rows.src_info
        refused(lambda: exchange.ep_fused_combine(outputs, source if odd else rows.src_info, rows.row_offsets, rows.counts,
                                                  output_tokens=inside), "output_tokens (", "src_info (")
        assert np.array_equal(combine(outputs), X)

    ferry.Group.threads(2).run(body)


def test_low_latency_combines_refuse_their_rows_as_out():
    def body(rank):
        buffer = ferry.deep_ep.Buffer(rank, int(2e9), 0, explicitly_destroy=True)
        x, ids = X[:, :1].repeat(128, 1).astype(ml_dtypes.bfloat16), IDS.astype(np.int64)
        recv, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
        weights, rows = np.ones((2, 1), np.float32), recv.copy()
        out = rows.reshape(-1, 128)[:2]
        refused(lambda: buffer.low_latency_combine(rows, ids, weights, handle, out=out if rank.index == 1 else x.copy()),
                "out (", "x (")
        y, *_ = buffer.low_latency_combine(rows, ids, weights, handle)
        assert np.array_equal(y, x)

    ferry.Group.threads(2).run(body)
