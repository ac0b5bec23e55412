"""Errors of the deep_ep interface's low-latency mode: typed, on every rank at once, and the next call works."""

import contextlib

import numpy as np
import pytest

import ferry
from deep_ep_steps import HIDDEN, Interrupted, full_step, low_latency, on_ranks
from oracle import bf16, routes_to, same_bits


@pytest.mark.parametrize("numbers", [("a", 16), (9.5, 16), (9, None), (0, 16)])
def test_numbers_of_low_latency_mode(rng, numbers):
    step = full_step(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        with pytest.raises(ferry.UsageError, match="expected an integer"):
            buffer.low_latency_dispatch(step.tokens[0], step.ids[0], *numbers)


@pytest.mark.parametrize("hook", [False, True])
def test_bad_low_latency_calls_end_on_all_ranks(rng, hook):
    step = full_step(rng)

    def finished(result):
        if hook:
            result[-1]()
        return result

    @on_ranks(2)
    def _(me, buffer):
        split = {"use_fp8": False, "return_recv_hook": hook}
        for wrong in ({"use_ue8m0": True}, {"async_finish": True, "return_recv_hook": True},
                      {"cumulative_local_expert_recv_stats": np.zeros(3, np.int32)}):
            with pytest.raises(ferry.UsageError, match=None if me else "rank 1 refused"):
                finished(low_latency(buffer, step, me, **(split | (wrong if me else {}))))
        recv, _, handle, *_ = finished(low_latency(buffer, step, me, **split))
        right = {"x": recv, "topk_idx": step.ids[me], "topk_weights": step.weights[me], "handle": handle,
                 "return_recv_hook": hook}
        for wrong in ({"x": recv[0]}, {"topk_weights": None}, {"topk_weights": step.weights[me][:1]},
                      {"topk_idx": step.ids[me][:1]}, {"topk_idx": step.ids[me].astype(np.float64)}, {"zero_copy": True},
                      {"zero_copy": True, "use_logfmt": True},
                      {"out": np.zeros((1, HIDDEN), bf16)}):
            with pytest.raises(ferry.UsageError, match=None if me else "rank 1 refused"):
                finished(buffer.low_latency_combine(**(right | (wrong if me else {}))))
        weights = step.weights[me].sum(1, keepdims=True)
        y = finished(buffer.low_latency_combine(**right))[0].astype(np.float32)
        assert np.allclose(y, weights * step.tokens[me].astype(np.float32), rtol=2e-2, atol=2e-2)


UNREADABLE = {
    "x": {"x": None}, "x of one dimension": {"x": np.ones(HIDDEN, bf16)}, "x that raises": {"x": Interrupted()},
    "ids": {"topk_idx": "ids"}, "no column of ids": {"topk_idx": np.zeros((5, 0), np.int64)},
    "33 columns of ids": {"topk_idx": np.zeros((5, 33), np.int64)}, "M": {"num_max_dispatch_tokens_per_rank": "9"},
    "E": {"num_experts": 16.5}, "use_fp8": {"use_fp8": np.ones(2)}, "async_finish": {"async_finish": np.ones(2)},
    "return_recv_hook": {"return_recv_hook": np.ones(2)}, "use_ue8m0_for_sf": {"use_nvfp4": True, "use_ue8m0_for_sf": True},
    "too many tokens": {"x": np.ones((10, HIDDEN), bf16), "topk_idx": np.zeros((10, 3), np.int64)},
    "x of another type and width": {"x": np.ones((5, 64), np.complex64)}, "ids of another type": {"topk_idx": np.ones((5, 2))},
    "x of float32": {"x": np.ones((5, HIDDEN), np.float32)},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_arguments_of_low_latency_mode_end_on_all_ranks(rng, name, later):
    """The peers' call ends too, and so the wrong rank's next call is not taken for it."""
    before, step = full_step(rng), full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        if later:  # otherwise it is the Buffer's first call
            low_latency(buffer, before, me, use_fp8=False)
        right = {"x": before.tokens[me], "topk_idx": before.ids[me], "num_max_dispatch_tokens_per_rank": 9, "num_experts": 16,
                 "use_fp8": False}
        with pytest.raises(BaseException if me else ferry.Error, match=None if me else "rank 1 refused") as raised:
            buffer.low_latency_dispatch(**(right | (UNREADABLE[name] if me else {})))
        assert me == 0 or name != "x that raises" or raised.type is KeyboardInterrupt
        recv, counts, *_ = low_latency(buffer, step, me, use_fp8=False)
        for e in range(8):
            sent = [step.tokens[rank][token] for expert, rank, token, _ in routes_to(step, me) if expert == me * 8 + e]
            assert counts[e] == len(sent) and all(same_bits(recv[e, i], row) for i, row in enumerate(sent))


@pytest.mark.parametrize("wrong", [{"handle": None}, {"zero_copy": np.ones(2)}, {"return_recv_hook": np.ones(2)}, {"x": Interrupted()}],
                         ids=lambda wrong: next(iter(wrong)))
def test_unreadable_arguments_of_low_latency_combine_end_on_all_ranks(rng, wrong):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        recv, _, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        right = {"x": recv, "topk_idx": step.ids[me], "topk_weights": step.weights[me], "handle": handle}
        expected = buffer.low_latency_combine(**right)[0]
        with pytest.raises(BaseException if me else ferry.UsageError, match=None if me else "rank 1 refused"):
            buffer.low_latency_combine(**(right | {"x": np.zeros_like(recv)} | (wrong if me else {})))
        assert same_bits(buffer.low_latency_combine(**right)[0], expected)


def test_ranks_that_combine_with_and_without_a_hook(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        recv, _, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        right = {"x": recv, "topk_idx": step.ids[me], "topk_weights": step.weights[me], "handle": handle}
        expected = buffer.low_latency_combine(**right)[0]
        for other in range(2):
            with pytest.raises(ferry.UsageError, match=r"return_recv_hook is (True|False) on rank [01] and (True|False) on rank [01]: pass the same"):
                *_, receive = buffer.low_latency_combine(**right, return_recv_hook=me == other)
                receive()
        assert same_bits(buffer.low_latency_combine(**right)[0], expected)


def test_an_expert_that_a_token_lists_twice(rng):
    """In low-latency mode an expert has R*M rows, and the message speaks of the interface's arguments."""
    step = full_step(rng)
    step.ids[1][:] = 3

    @on_ranks(2)
    def _(me, buffer):
        for hook in (False, True):
            with pytest.raises(ferry.OverflowError, match=r"topk_idx: some token lists an expert more than once: .* R\*M = 10; .* at most once"):
                *_, receive = low_latency(buffer, step, me, most=5, use_fp8=False, return_recv_hook=hook)
                receive()


def test_a_bad_id_raises_in_the_hook_of_its_rank(rng):
    step = full_step(rng)
    good = step.ids[1].copy()
    step.ids[1][2, 0] = 99

    @on_ranks(2)
    def _(me, buffer):
        for _ in range(6):
            stats = np.zeros(8, np.int32)
            recv, counts, handle, _, hook = low_latency(
                buffer, step, me, use_fp8=False, return_recv_hook=True, cumulative_local_expert_recv_stats=stats)
            with pytest.raises(ferry.BadIdError) if me else contextlib.nullcontext():
                hook()
            # All other rows were received.
            routes = [[r for r in routes_to(step, me) if r[0] == me * 8 + e] for e in range(8)]
            assert counts.tolist() == stats.tolist() == [len(of_expert) for of_expert in routes]
            for e, of_expert in enumerate(routes):
                assert handle[0][e, : counts[e]].tolist() == [token for _, _, token, _ in of_expert]
            with pytest.raises(ferry.UsageError, match="called before"):
                hook()
            assert stats.tolist() == counts.tolist()
        step_again = type(step)(16, 3, step.tokens, [step.ids[0], good], step.weights)
        assert low_latency(buffer, step_again, me, use_fp8=False)[1].sum() == len(routes_to(step_again, me))


def test_a_hook_of_combine_that_fails_frees_its_exchange(rng):
    step = full_step(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        recv, _, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        for _ in range(6):
            *_, hook = buffer.low_latency_combine(recv, step.ids[0], step.weights[0], handle, return_recv_hook=True)
            handle.exchange.combine_receive()  # so that nothing is left to receive
            with pytest.raises(ferry.UsageError):
                hook()
