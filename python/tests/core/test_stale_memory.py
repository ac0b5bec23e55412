"""Plans, results and tensors whose memory was overwritten or freed are refused, never followed."""

import time

import numpy as np
import pytest

import ferry
from oracle import bf16

HIDDEN, TOKENS = 64, 32
SETTINGS = {"experts": 4, "top_k": 2, "hidden": HIDDEN, "max_tokens": TOKENS, "repeats": True}
X = np.ones((TOKENS, HIDDEN), bf16)
IDS = np.tile(np.array([[0, 3]], np.int32), (TOKENS, 1))


def on_one_rank(body, **settings):
    def with_exchange(rank):
        body(ferry.Exchange(rank, **(SETTINGS | settings)))

    ferry.Group.threads(1).run(with_exchange)


def memory_for_plans(exchange):
    return np.empty(ferry.plan_bytes(exchange.config, 1), np.uint8)


def test_plans_overwritten_by_another_dispatch():
    def body(exchange):
        memory = ferry.ReceiveBuffers(plan=memory_for_plans(exchange))
        small = exchange.dispatch(X[:1], IDS[:1], memory=memory).plan
        over = exchange.plan_over(small.storage)
        rows = exchange.dispatch(X, IDS, memory=memory)
        out = np.full((TOKENS, HIDDEN), 7, bf16)
        for stale in (small, over):
            for call in (
                lambda: exchange.combine(rows.data, stale, result=out[:1]),
                lambda: exchange.dispatch(X[:1], stale),
                lambda: stale.rows,
                lambda: stale.copy(),
            ):
                with pytest.raises(ferry.UsageError, match="a later dispatch has written another plan to its memory"):
                    call()
        assert (out == 7).all()
        exchange.combine(rows.data, rows.plan, result=out)
        assert not (out == 7).any()

    on_one_rank(body)


def test_plans_overwritten_by_the_caller():
    def body(exchange):
        memory, other = memory_for_plans(exchange), memory_for_plans(exchange)
        small = exchange.dispatch(X[:1], IDS[:1], memory=ferry.ReceiveBuffers(plan=memory)).plan
        rows = exchange.dispatch(X, IDS, memory=ferry.ReceiveBuffers(plan=other))
        memory[:] = other
        with pytest.raises(ferry.UsageError, match=f"had 1 token, but its memory now holds a plan of {TOKENS}"):
            exchange.combine(rows.data, small)
        exchange.combine(rows.data, exchange.plan_over(memory))

    on_one_rank(body)


def test_plan_over_with_another_number_of_tokens():
    def body(exchange):
        plan = exchange.dispatch(X, IDS).plan.copy()
        assert exchange.plan_over(plan.storage, tokens=TOKENS).tokens == TOKENS
        for tokens in (0, 1, TOKENS - 1):
            with pytest.raises(ferry.UsageError, match=f"tokens = {tokens}, but the plan has {TOKENS} tokens"):
                exchange.plan_over(plan.storage, tokens=tokens)

    on_one_rank(body)


def require_none(exchange):
    with pytest.raises(ferry.UsageError, match="last_dispatch_result: lane 0 has none"):
        exchange.last_dispatch_result()


def test_last_dispatch_result_without_a_dispatch():
    def body(exchange):
        require_none(exchange)
        with pytest.raises(ferry.UsageError):
            exchange.dispatch(np.ones((TOKENS + 1, HIDDEN), bf16), np.zeros((TOKENS + 1, 2), np.int32))
        require_none(exchange)
        assert exchange.dispatch(X, IDS).call == exchange.last_dispatch_result().call
        exchange.dispatch_send(X, IDS, format="fp8")
        require_none(exchange)
        exchange.dispatch_receive()
        assert exchange.last_dispatch_result().scales.shape[1] == 1

    on_one_rank(body)


def test_last_dispatch_result_after_a_peer_refused():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        exchange.dispatch(X, IDS)
        with pytest.raises(ferry.UsageError):
            exchange.dispatch(X, IDS if rank.index == 0 else IDS[:1])
        if rank.index == 0:
            require_none(exchange)
        exchange.dispatch(X, IDS)
        assert exchange.last_dispatch_result().plan.rows.shape == (TOKENS, 2)

    ferry.Group.threads(2).run(body)


def test_a_dispatch_that_writes_nothing_leaves_the_last_result_valid():
    def body(exchange):
        rows = exchange.dispatch(X, IDS)
        many = np.ones((TOKENS + 1, HIDDEN), bf16), np.zeros((TOKENS + 1, 2), np.int32)
        misfits = np.ones((TOKENS, HIDDEN), bf16), np.zeros((TOKENS, 3), np.int32)
        for call in (exchange.dispatch, exchange.dispatch_send):
            for arguments in (many, misfits):
                with pytest.raises(ferry.UsageError):
                    call(*arguments)
                assert rows.plan.rows.shape == (TOKENS, 2)
                assert exchange.last_dispatch_result().call == rows.call
                assert exchange.combine(rows.data, rows.plan).shape == (TOKENS, HIDDEN)

    on_one_rank(body)


def test_a_send_phase_makes_the_plan_stale():
    def body(exchange):
        plan = exchange.dispatch(X, IDS).plan
        exchange.dispatch_send(X, IDS)
        with pytest.raises(ferry.UsageError, match="a later dispatch of lane 0 has overwritten it"):
            plan.rows
        exchange.dispatch_receive()

    on_one_rank(body)


@pytest.mark.parametrize("memory_of_the_caller", [False, True])
def test_a_dispatch_that_fails_after_it_has_written(memory_of_the_caller):
    """Rank 1 never takes part, so rank 0's dispatch fails when its plan is half written; a second fails before."""

    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS, deadline=0.5)
        memory = ferry.ReceiveBuffers(plan=np.empty(ferry.plan_bytes(exchange.config, 2), np.uint8)) if memory_of_the_caller else None
        plan = exchange.dispatch(X, IDS, memory=memory).plan
        if rank.index == 1:
            time.sleep(1.5)
            return
        with pytest.raises(ferry.TimeoutError):
            exchange.dispatch(X, IDS, memory=memory)
        with pytest.raises(ferry.UsageError, match="a later dispatch"):
            plan.rows
        require_none(exchange)
        with pytest.raises(ferry.TimeoutError):
            exchange.dispatch_send(X, IDS, memory=memory)
        require_none(exchange)

    ferry.Group.threads(2).run(body)


def test_a_send_phase_that_fails_before_it_has_written():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS, deadline=0.5)
        plan = exchange.dispatch(X, IDS).plan
        if rank.index == 1:
            time.sleep(1.5)
            return
        with pytest.raises(ferry.TimeoutError):
            exchange.metadata(1)
        with pytest.raises(ferry.TimeoutError):
            exchange.dispatch_send(X, IDS)
        assert plan.rows.shape == (TOKENS, 2)  # its memory was not touched
        require_none(exchange)

    ferry.Group.threads(2).run(body)


def test_a_list_of_parts_that_is_emptied_later():
    def body(exchange):
        blocks, leading = HIDDEN // 128 + 1, -(-exchange.capacity // 4) * 4
        parts = [np.zeros((exchange.capacity, HIDDEN), np.uint8), np.zeros((blocks, leading), np.float32)]
        rows = exchange.dispatch(X, IDS, memory=ferry.ReceiveBuffers(parts))
        parts.clear()
        assert (rows.scales[: rows.plan.total] > 0).all() and len(rows.data) == exchange.capacity

    on_one_rank(body, format="fp8-columns", own_receive_buffers=False)


def test_tensors_without_memory():
    torch = pytest.importorskip("torch")

    def freed(tensor):
        tensor.untyped_storage().resize_(0)
        return tensor

    def body(exchange):
        x, ids = torch.ones(3, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 3)
        weights = torch.rand(3, 2)
        rows = exchange.dispatch(x, ids, weights)
        plan, data = rows.plan.copy(), rows.data.clone()
        for call, name in (
            (lambda: exchange.dispatch(x, ids, freed(weights.clone())), "weights"),
            (lambda: exchange.combine(data, plan, row_weights=freed(torch.ones(exchange.capacity))), "weights"),
            (lambda: exchange.combine(data, plan, topk_weights=freed(weights.clone())), "topk_weights"),
            (lambda: exchange.route_values(freed(weights.clone()), plan), "values"),
            (lambda: exchange.return_values(freed(torch.ones(exchange.capacity)), plan), "row_values"),
            (lambda: exchange.plan_over(freed(plan.storage.clone())), "storage"),
            (lambda: exchange.dispatch(x, ids, freed(torch.ones(4, 2)[1:])), "weights"),
            (lambda: exchange.dispatch(x, ids, memory=ferry.ReceiveBuffers(plan=freed(plan.storage.clone()))), "memory.plan"),
        ):
            with pytest.raises(ferry.UsageError, match=f"{name}: has no memory"):
                call()

    on_one_rank(body)
