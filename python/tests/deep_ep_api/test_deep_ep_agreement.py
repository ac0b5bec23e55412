"""Ranks that disagree about a call of deep_ep: each gets an error at once, and the next call works."""

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.deep_ep
from deep_ep_steps import HIDDEN, full_step, layout_and_dispatch, low_latency, on_ranks, step_of
from oracle import bf16, messages_to, routes_to, same_bits


def test_ranks_with_different_shapes(rng):
    step = step_of(rng, ranks=2)

    @on_ranks(2)
    def _(me, buffer):
        cut = type(step)(step.experts, 2 if me else 3, step.tokens, [i[:, : 2 if me else 3] for i in step.ids],
                         [w[:, : 2 if me else 3] for w in step.weights])
        with pytest.raises(ferry.UsageError, match="hidden, experts, top_k"):
            layout_and_dispatch(buffer, cut, me)


def first_combine_of_weights(buffer, step, me):
    rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me)
    buffer.combine(rows, handle, topk_weights=weights)


@pytest.mark.parametrize(("theirs", "call"), [(low_latency, "the first low-latency call of a shape"),
                                              (first_combine_of_weights, "the first combine with topk_weights of a shape")])
def test_ranks_in_different_calls(rng, theirs, call):
    step = full_step(rng)

    def without_weights(buffer, step, me):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        buffer.combine(rows, handle)
        layout_and_dispatch(buffer, step, me)

    @on_ranks(2)
    def _(me, buffer):
        mine = theirs if me else without_weights if theirs is first_combine_of_weights else layout_and_dispatch
        with pytest.raises(ferry.UsageError, match=f"rank 0 is in a dispatch without a handle, rank 1 in {call}"):
            mine(buffer, step, me)
        first_combine_of_weights(buffer, step, me)
        low_latency(buffer, step, me)


@pytest.mark.parametrize("peer", ["first call", "dispatch", "hook of dispatch", "combine", "hook of combine"])
@pytest.mark.parametrize(("name", "other"), [("num_max_dispatch_tokens_per_rank", {"most": 12}), ("num_experts", {"experts": 32}),
                                             ("the number of columns of topk_idx", {"top_k": 2}), ("the number of columns of x", {"hidden": 128})])
def test_ranks_with_different_low_latency_shapes(rng, name, other, peer):
    """Rank 1 is in the first call of a shape, rank 0 in one of that shape too or in a call of an exchange that exists."""
    step, hooked = full_step(rng), "hook" in peer

    @on_ranks(2)
    def _(me, buffer):
        if peer != "first call":
            low_latency(buffer, step, me, most=20)  # of a shape that no later call has
            recv, _, handle, *_ = low_latency(buffer, step, me, use_fp8=False)

        def finish(result):
            if hooked:
                result[-1]()

        mine = other if me else {}
        x, ids = step.tokens[me][:, : mine.get("hidden")], step.ids[me][:, : mine.get("top_k")]
        with pytest.raises(ferry.UsageError, match=f"low-latency mode: {name} is [0-9]+ on rank 0 and [0-9]+ on rank 1"):
            if "combine" in peer and me == 0:
                finish(buffer.low_latency_combine(recv, ids, step.weights[me], handle, return_recv_hook=hooked))
            else:
                finish(buffer.low_latency_dispatch(x, ids, mine.get("most", 9), mine.get("experts", 16), return_recv_hook=hooked))
        for most in (9, 20, 12, 9):
            recv, counts, handle, *_ = low_latency(buffer, step, me, most=most, use_fp8=False)
            for e in range(8):
                sent = [step.tokens[rank][token] for expert, rank, token, _ in routes_to(step, me) if expert == me * 8 + e]
                assert counts[e] == len(sent) and all(same_bits(recv[e, i], row) for i, row in enumerate(sent))


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("peer", ["dispatch", "hook of dispatch", "combine", "hook of combine"])
@pytest.mark.parametrize(("name", "other"), [("num_max_dispatch_tokens_per_rank", {"most": 12}), ("num_experts", {"experts": 32}),
                                             ("the number of columns of topk_idx", {"top_k": 2}), ("the number of columns of x", {"hidden": 128})])
def test_ranks_with_different_low_latency_shapes_that_exist(rng, name, other, peer, last):
    """Both shapes have an exchange; `last`: whose shape the last call had, 2: neither's."""
    step, hooked = full_step(rng), "hook" in peer

    @on_ranks(2)
    def _(me, buffer):
        def call(of, **settings):
            x, ids = step.tokens[me][:, : of.get("hidden")], step.ids[me][:, : of.get("top_k")]
            return buffer.low_latency_dispatch(x, ids, of.get("most", 9), of.get("experts", 16), use_fp8=False, **settings)

        shapes, hooks = [{}, other, {"most": 20}], []
        for shape in shapes[:2] * 2:  # two exchanges of each
            hooks.append(call(shape, return_recv_hook=True)[-1])
        for hook in hooks:
            hook()
        recv, _, handle, *_ = call({})
        for shape in (*shapes, shapes[last]):
            call(shape)
        for _ in range(2):
            with pytest.raises(ferry.UsageError, match=f"low-latency mode: {name} is [0-9]+ on rank 0 and [0-9]+ on rank 1"):
                if me == 0 and "combine" in peer:
                    result = buffer.low_latency_combine(recv, step.ids[me], step.weights[me], handle, return_recv_hook=hooked)
                else:
                    result = call(shapes[me], return_recv_hook=hooked)
                if hooked:
                    result[-1]()
            for most in (9, 20, 12, 9):
                rows, counts, *_ = low_latency(buffer, step, me, most=most, use_fp8=False)
                for e in range(8):
                    sent = [step.tokens[rank][token] for expert, rank, token, _ in routes_to(step, me) if expert == me * 8 + e]
                    assert counts[e] == len(sent) and all(same_bits(rows[e, i], row) for i, row in enumerate(sent))
            call(shapes[last])


def test_a_hook_may_be_called_after_the_first_call_of_another_shape_on_one_rank(rng):
    steps = [full_step(rng) for _ in range(6)]

    @on_ranks(2)
    def _(me, buffer):
        for step, most in zip(steps, (9, 10, 11, 9, 10, 11)):
            recv, counts, _, _, hook = low_latency(buffer, step, me, most=9, use_fp8=False, return_recv_hook=True)
            if me:
                hook()
            low_latency(buffer, step, me, most=most + 10)
            if not me:
                hook()
            for e in range(8):
                sent = [step.tokens[rank][token] for expert, rank, token, _ in routes_to(step, me) if expert == me * 8 + e]
                assert counts[e] == len(sent) and all(same_bits(recv[e, i], row) for i, row in enumerate(sent))


@pytest.mark.parametrize("shape", ["unreadable", "another", "the same"])
@pytest.mark.parametrize("call", ["a dispatch with a handle", "a combine"])
def test_a_rank_without_a_handle(rng, call, shape):
    """Rank 1 dispatches without a handle; the error on both ranks says so."""
    step = full_step(rng)
    cut = type(step)(16, 2, step.tokens, [ids[:, :2].copy() for ids in step.ids], [w[:, :2].copy() for w in step.weights])

    @on_ranks(2)
    def _(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        expected = "dispatch of new routes without num_worst_tokens on rank 1" if shape == "the same" else f"rank 0 is in {call}, rank 1 in a dispatch without a handle"
        with pytest.raises(ferry.UsageError, match=expected):
            if me == 0:
                buffer.combine(rows, handle) if call == "a combine" else buffer.dispatch(step.tokens[me], handle)
            elif shape == "unreadable":
                buffer.dispatch(step.tokens[me], None)
            else:
                layout_and_dispatch(buffer, cut if shape == "another" else step, me)
        assert same_bits(layout_and_dispatch(buffer, step, me)[0], rows)
        assert same_bits(buffer.combine(rows, handle)[0], buffer.combine(buffer.dispatch(step.tokens[me], handle)[0], handle)[0])


@pytest.mark.parametrize("other", ["hidden", "top_k", "num_worst_tokens"])
def test_worst_cases_that_differ(rng, other):
    step = full_step(rng)
    cut = type(step)(16, 2, step.tokens, [ids[:, :2].copy() for ids in step.ids], [w[:, :2].copy() for w in step.weights])

    @on_ranks(2)
    def _(me, buffer):
        rows = layout_and_dispatch(buffer, step, me)[0]
        wrong = {"hidden": {"x": np.ones((5, 2 * HIDDEN), bf16)}, "num_worst_tokens": {"num_worst_tokens": 2000}}.get(other, {}) if me else {}
        expected = "rank 0 is in a dispatch with num_worst_tokens of the last one's shape and size, rank 1 in a dispatch without a handle"
        with pytest.raises(ferry.UsageError, match=expected):
            layout_and_dispatch(buffer, cut if me and other == "top_k" else step, me, **({"num_worst_tokens": 20} | wrong))
        assert same_bits(layout_and_dispatch(buffer, step, me)[0], rows)


def count_gatherings(buffer):
    """A list that gets an entry for every exchange of numbers between the ranks' hosts."""
    gatherings, gather = [], buffer.exchanges._gather

    def counting(*arguments):
        gatherings.append(arguments[0])
        return gather(*arguments)

    buffer.exchanges._gather = counting
    return gatherings


def test_hosts_exchange_numbers_in_the_first_call_only(rng):
    steps = [step_of(rng, ranks=3, most=most) for most in (40, 200, 1, 256)]

    @on_ranks(3)
    def _(me, buffer):
        gatherings = count_gatherings(buffer)
        for step in steps:
            recv_x, *_, handle, _ = layout_and_dispatch(buffer, step, me)
            assert len(recv_x) == len(messages_to(step, me))
            assert same_bits(buffer.combine(recv_x, handle)[0], buffer.combine(buffer.dispatch(step.tokens[me], handle)[0], handle)[0])
            layout_and_dispatch(buffer, step, me, num_worst_tokens=3 * 256)
        assert len(gatherings) == 1


class RankWithoutHosts:
    """A rank whose host exchanges nothing with others any more."""

    def __init__(self, rank):
        self.index, self.size = rank.index, rank.size


def test_a_dispatch_without_ids_exchanges_numbers_in_the_first_call_only(rng):
    steps = [step_of(rng, ranks=3, most=most) for most in (40, 200, 1, 256)]

    @on_ranks(3)
    def _(me, buffer):
        for step in steps:
            *_, counts, handle, _ = layout_and_dispatch(buffer, step, me, topk_idx=None, topk_weights=None)
            mine = ferry.Placement.blocks(step.experts, 3).experts_of(me)
            assert counts == [sum(int((ids == expert).sum()) for ids in step.ids) for expert in mine]
            buffer.exchanges.rank = RankWithoutHosts(buffer.exchanges.rank)


@pytest.mark.parametrize("grows", [(0,), (1, 2)])
def test_a_rank_with_more_tokens_makes_all_ranks_enlarge(rng, grows):
    small, large = step_of(rng, ranks=3, most=20), step_of(rng, ranks=3, most=600)
    for rank in range(3):
        if rank not in grows:
            for of_rank in ("tokens", "ids", "weights"):
                getattr(large, of_rank)[rank] = getattr(small, of_rank)[rank]
    for rank in grows:  # more than the first exchange has room for
        large.tokens[rank] = np.resize(large.tokens[rank], (300, HIDDEN))
        large.ids[rank] = np.resize(large.ids[rank], (300, 3))
        large.weights[rank] = np.resize(large.weights[rank], (300, 3))

    @on_ranks(3)
    def _(me, buffer):
        gatherings = count_gatherings(buffer)
        for step in (small, large, small, large):
            recv_x, *_, handle, _ = layout_and_dispatch(buffer, step, me)
            expected = messages_to(step, me)
            assert [token for _, token in expected] == handle[3].tolist()
            for row, (source, token) in enumerate(expected):
                assert same_bits(recv_x[row], step.tokens[source][token])
        assert len(gatherings) == 2


def test_received_rows_have_memory_of_their_own_size(rng):
    step = step_of(rng, ranks=3, most=100)

    @on_ranks(3)
    def _(me, buffer):
        for _ in range(2):
            recv_x, recv_idx, recv_weights, *_ = layout_and_dispatch(buffer, step, me)
            rows = max(1, len(messages_to(step, me)))
            for array in (recv_x, recv_weights):
                assert (array if array.base is None else array.base).shape[0] == rows


def test_more_tokens_than_the_worst_case_allows(rng):
    small, large = step_of(rng, ranks=2, most=20), step_of(rng, ranks=2, most=600)
    large.tokens[1] = np.resize(large.tokens[1], (300, HIDDEN))
    large.ids[1], large.weights[1] = np.resize(large.ids[1], (300, 3)), np.resize(large.weights[1], (300, 3))
    large.tokens[0], large.ids[0], large.weights[0] = small.tokens[0], small.ids[0], small.weights[0]

    @on_ranks(2)
    def _(me, buffer):
        layout_and_dispatch(buffer, small, me)
        with pytest.raises(ferry.UsageError, match="x: 300 tokens, but num_worst_tokens = 40 has room for 256 of each rank"):
            layout_and_dispatch(buffer, large, me, num_worst_tokens=40)
        worst_x, *_ = layout_and_dispatch(buffer, large, me, num_worst_tokens=2 * 300)  # says what is needed
        assert len(worst_x) == 600


def test_a_bad_worst_case_call_ends_on_all_ranks(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        layout_and_dispatch(buffer, step, me)
        x = step.tokens[me].astype(np.float32) if me else step.tokens[me]
        with pytest.raises(ferry.UsageError, match="expected bfloat16" if me else "rank 1 refused dispatch .*expected bfloat16"):
            layout_and_dispatch(buffer, step, me, x=x, num_worst_tokens=20)
        *_, handle, _ = layout_and_dispatch(buffer, step, me, num_worst_tokens=20)
        with pytest.raises(ferry.UnsupportedError, match="num_worst_tokens"):
            handle[2]
        assert [token for _, token in messages_to(step, me)] == handle[3].tolist()


@pytest.mark.parametrize("call", ["dispatch by a handle", "combine", "worst case"])
def test_ranks_in_different_calls_of_normal_mode(rng, call):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        recv_x, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        calls = {
            "dispatch by a handle": lambda: buffer.dispatch(step.tokens[me], handle),
            "combine": lambda: buffer.combine(recv_x, handle),
            "worst case": lambda: layout_and_dispatch(buffer, step, me, num_worst_tokens=20),
        }
        with pytest.raises(ferry.UsageError, match="dispatch of new routes without num_worst_tokens"):
            calls[call]() if me else layout_and_dispatch(buffer, step, me)
        assert same_bits(layout_and_dispatch(buffer, step, me)[0], recv_x)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("other", [{"use_fp8": True}, {"use_fp8": True, "round_scale": True}, {"use_fp8": True, "round_scale": True, "use_ue8m0": True}], ids=str)
def test_low_latency_formats_that_differ(rng, other, hook):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        with pytest.raises(ferry.UsageError, match="the format that use_fp8, round_scale, use_ue8m0 and use_nvfp4 choose is .*: pass the same on every rank"):
            *_, receive = low_latency(buffer, step, me, return_recv_hook=hook, **({"use_fp8": False} | (other if me else {})))
            receive()
        recv, _, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        assert buffer.low_latency_combine(recv, step.ids[me], step.weights[me], handle)[0].shape == step.tokens[me].shape


def test_tokens_in_fp8_on_one_rank(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        rows, *_ = layout_and_dispatch(buffer, step, me)
        with pytest.raises(ferry.UsageError, match="x is (bf16|a tuple of values and scales) on rank .*: pass the same on every rank"):
            scaled = (np.zeros((len(step.tokens[me]), HIDDEN), ml_dtypes.float8_e4m3fn), np.zeros((len(step.tokens[me]), HIDDEN // 128), np.float32))
            layout_and_dispatch(buffer, step, me, **({"x": scaled} if me else {}))
        assert same_bits(layout_and_dispatch(buffer, step, me)[0], rows)


def test_an_environment_that_is_wrong_on_one_rank(monkeypatch):
    """Each rank has an environment of its own: ranks are processes."""
    def body(rank):
        if rank.index:
            monkeypatch.setenv("NVSHMEM_QP_DEPTH", "many")
        with pytest.raises(ferry.UsageError, match="NVSHMEM_QP_DEPTH: expected an integer, got 'many'") as caught:
            ferry.deep_ep.Buffer(rank)
        assert rank.index or "rank 1" in str(caught.value)
        monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
        return ferry.deep_ep.Buffer(rank).nvshmem_qp_depth

    assert ferry.Group.processes(2).run(body) == [1024, 1024]
