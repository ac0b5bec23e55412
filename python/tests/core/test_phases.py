"""Send and receive phases, lanes, reused plans, and gradients."""

import threading

import pytest

import ferry
from exchange_steps import exchange_for, inputs
from oracle import random_step, same_bits


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
