"""Send and receive phases, lanes, reused plans, and gradients."""

import threading

import numpy as np
import pytest

import ferry
from exchange_steps import HIDDEN, exchange_for, inputs
from oracle import bf16, random_step, same_bits


def test_phases_give_the_result_of_fused_calls(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step)
        tokens, ids, weights = (array.copy() for array in inputs(step, rank))
        rows = exchange.dispatch(tokens, ids, weights)
        data = rows.data[: rows.plan.total].copy()
        y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        exchange.dispatch_send(tokens, ids, weights)
        tokens[...], ids[...], weights[...] = 9, -1, 9  # the send phase no longer needs them
        result = exchange.dispatch_receive()
        assert same_bits(result.data[: result.plan.total], data)
        outputs = result.data.copy()
        exchange.combine_send(outputs, result.plan, row_weights=result.weight)
        outputs[...] = 9
        assert same_bits(exchange.combine_receive(), y)

    ferry.Group.threads(4).run(body)


def test_the_receive_phase_in_another_thread(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step)
        exchange.dispatch_send(*inputs(step, rank))
        received = []
        thread = threading.Thread(target=lambda: received.append(exchange.dispatch_receive()))
        thread.start()
        thread.join()
        assert same_bits(received[0].data, exchange.dispatch(*inputs(step, rank)).data)

    step = random_step(rng, ranks=3)
    ferry.Group.threads(3).run(body)


def test_lanes_are_independent(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step, lanes=2)
        order = [0, 1] if rank.index % 2 else [1, 0]
        for lane in order:
            exchange.dispatch_send(*inputs(step, rank), lane=lane)
        rows = {lane: exchange.dispatch_receive(lane=lane) for lane in reversed(order)}
        assert same_bits(rows[0].data[: rows[0].plan.total], rows[1].data[: rows[1].plan.total])
        results = [exchange.combine(rows[lane].data, rows[lane].plan, row_weights=rows[lane].weight, lane=lane) for lane in (0, 1)]
        assert same_bits(*results)

    ferry.Group.threads(4).run(body)


def test_the_order_of_phases_is_checked(rng):
    step = random_step(rng, ranks=1)

    def body(rank):
        exchange = exchange_for(rank, step)
        with pytest.raises(ferry.UsageError, match="no dispatch has been sent"):
            exchange.dispatch_receive()
        exchange.dispatch_send(*inputs(step, rank))
        with pytest.raises(ferry.UsageError, match="has been sent and not received"):
            exchange.dispatch(*inputs(step, rank))
        exchange.dispatch_receive()
        with pytest.raises(ferry.UsageError, match="no combine has been sent"):
            exchange.combine_receive()

    ferry.Group.threads(1).run(body)


@pytest.mark.parametrize("wrong", [{"nonsense": 1}, {"lane": None}, {"lane": 7}, {"lane": "0"}, {"stream": "wrong"}, "more"], ids=str)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_receive_phase_with_arguments_that_do_not_fit_ends_the_call(rng, phase, wrong):
    """The peers have this rank's rows already, and their next call pairs with this rank's."""
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step, deadline=5)
        given = ((1,), {}) if wrong == "more" else ((), wrong)

        def receive(of_phase):
            method = getattr(exchange, f"{of_phase}_receive")
            if rank.index != 1 or of_phase != phase:
                return method()
            with pytest.raises(ferry.UsageError, match="_receive: there is no (argument|place)|lane|stream"):
                method(*given[0], **given[1])
            with pytest.raises(ferry.UsageError, match=f"no {phase} has been sent"):
                method()
            return exchange.last_dispatch_result() if phase == "dispatch" else None

        good = exchange.dispatch(*inputs(step, rank))
        expected = exchange.combine(good.data.copy(), good.plan, row_weights=good.weight)
        for _ in range(2):
            exchange.dispatch_send(*inputs(step, rank))
            rows = receive("dispatch")
            exchange.combine_send(rows.data.copy(), rows.plan, row_weights=rows.weight)
            result = receive("combine")
            assert result is None or same_bits(result, expected)

    ferry.Group.threads(4).run(body)


def test_a_copy_of_a_plan_outlives_the_next_dispatch(rng):
    steps = [random_step(rng), random_step(rng)]

    def body(rank):
        exchange = exchange_for(rank, steps[0])
        first = exchange.dispatch(*inputs(steps[0], rank))
        data, weight = first.data.copy(), first.weight.copy()
        y = exchange.combine(data, first.plan, row_weights=weight)
        copied = first.plan.copy()
        exchange.dispatch(*inputs(steps[1], rank))
        with pytest.raises(ferry.UsageError, match="overwritten"):
            exchange.combine(data, first.plan, row_weights=weight) if rank.index == 0 else first.plan.total
        if rank.index:  # rank 0 refused this combine for every rank
            with pytest.raises(ferry.UsageError, match="rank 0 refused"):
                exchange.combine(data, copied, row_weights=weight)
        assert same_bits(exchange.combine(data, copied, row_weights=weight), y)

    ferry.Group.threads(4).run(body)


def test_gradients_of_combine_and_dispatch(rng):
    step = random_step(rng, dtype=np.float32)

    def body(rank):
        exchange = exchange_for(rank, step, format="fp32", combine_type="fp32", reduction="exact")
        tokens, ids, weights = inputs(step, rank)
        rows = exchange.dispatch(tokens, ids, weights)
        plan, outputs = rows.plan.copy(), rows.data * 3
        dy = rng.standard_normal(tokens.shape).astype(np.float32)
        back, d_weights = exchange.combine_backward(dy, plan, weights, outputs)
        expected = np.where(ids >= 0, 3 * (dy * tokens).sum(1, keepdims=True), 0)
        assert np.allclose(d_weights, expected, rtol=1e-4, atol=1e-4)
        dx = exchange.combine(back.data, back.plan)
        assert np.allclose(dx, dy * np.where(ids >= 0, weights, 0).sum(1, keepdims=True), rtol=1e-5, atol=1e-6)

    ferry.Group.threads(4).run(body)


def test_apply_weights_and_dot_rows(rng):
    step = random_step(rng, dtype=np.float32)

    def body(rank):
        exchange = exchange_for(rank, step, format="fp32", combine_type="fp32")
        tokens, ids, weights = inputs(step, rank)
        plain = exchange.dispatch(tokens, ids, weights)
        total, data, weight = plain.plan.total, plain.data.copy(), plain.weight.copy()
        v = np.ones((exchange.capacity, HIDDEN), np.float32)
        weighted = exchange.dispatch(tokens, plain.plan, weights, apply_weights=True, dot_rows=v)
        assert same_bits(weighted.data[:total], data[:total] * weight[:total, None])
        assert np.allclose(weighted.dots[:total], data[:total].sum(1), rtol=1e-4, atol=1e-4)

    ferry.Group.threads(4).run(body)
