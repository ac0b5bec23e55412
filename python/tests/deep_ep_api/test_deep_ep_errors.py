"""Errors of the deep_ep interface: typed, on every rank at once, and the next call works."""

import contextlib
import threading
import time

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, Interrupted, fp8, full_step, layout_and_dispatch, low_latency, on_ranks, step_of
from ferry.deep_ep import _exchanges
from oracle import bf16, messages_to, same_bits


def test_bad_arguments(rng):
    step = step_of(rng, ranks=1)

    @on_ranks(1)
    def _(me, buffer):
        with pytest.raises(ferry.UsageError, match="are needed"):
            buffer.dispatch(step.tokens[0])
        with pytest.raises(ferry.UsageError, match="go together"):
            layout_and_dispatch(buffer, step, me, topk_weights=None)
        with pytest.raises(ferry.UsageError, match="num_worst_tokens needs"):
            layout_and_dispatch(buffer, step, me, topk_idx=None, topk_weights=None, num_worst_tokens=9)
        with pytest.raises(ferry.UsageError, match="expected bfloat16"):
            layout_and_dispatch(buffer, step, me, x=step.tokens[0].astype(np.float32))
        with pytest.raises(ferry.UsageError, match="float32 or int32 scales"):
            layout_and_dispatch(buffer, step, me, x=(step.tokens[0], step.tokens[0]))
        with pytest.raises(ferry.UsageError, match="use_ue8m0 needs round_scale"):
            low_latency(buffer, step, me, use_ue8m0=True)
        with pytest.raises(ferry.UsageError, match="x: 2 tokens, but num_max_dispatch_tokens_per_rank = 1"):
            low_latency(buffer, step_of(rng, 1, most=1), me, most=1, use_fp8=False)
            buffer.low_latency_dispatch(np.ones((2, HIDDEN), bf16), np.zeros((2, 3), np.int64), 1, step.experts)
        *_, handle, _ = layout_and_dispatch(buffer, step, me)
        with pytest.raises(ferry.UsageError, match="bfloat16"):
            buffer.combine(step.tokens[0].astype(np.float32), handle)


def test_messages_name_the_arguments_of_the_interface(rng):
    """They say nothing of max_tokens, formats, configurations and experts in general, which are Ferry's words."""
    step = full_step(rng, 1)
    x, ids, weights = step.tokens[0], step.ids[0], step.weights[0]

    @on_ranks(1)
    def _(me, buffer):
        def dispatch(**settings):
            return layout_and_dispatch(buffer, step, me, **settings)

        def decode(x=x, ids=ids, most=9, experts=16, **settings):
            return buffer.low_latency_dispatch(x, ids, most, experts, **settings)

        rows, _, theirs, _, handle, _ = dispatch()
        recv, _, low_latency_handle, *_ = decode(use_fp8=False)
        scales = np.ones((5, 200), np.float32)
        for call, words in [
            (lambda: dispatch(x=x[:, :100].copy()), r"x: expected a hidden size that is a multiple of 8, .* got shape \[5, 100\]"),
            (lambda: dispatch(x=(x.astype(fp8), scales)), r"x\[1\]: expected at most 64 scales a row of 256 values, got 200"),
            (lambda: buffer.dispatch((x.astype(fp8), scales), handle), r"x\[1\]: expected at most 64 scales"),
            (lambda: dispatch(num_worst_tokens=2**31 - 1), "num_worst_tokens: expected an integer from 0 to 16777216"),
            (lambda: buffer.get_dispatch_layout(np.tile(ids, (1, 11)), 16), r"topk_idx: expected 1 to 32 columns, got shape \[5, 33\]"),
            (lambda: buffer.combine(rows, handle, topk_weights=theirs[:, :1]), r"topk_weights: expected float32 of shape \[any, 3\]"),
            (lambda: decode(x=x[:, :100].copy()), "x: expected a hidden size"),
            (lambda: decode(x=x[:, :200].copy()), r"x: expected a hidden size that is a multiple of 16 with use_fp8, got shape \[5, 200\]"),
            (lambda: decode(x=x[:, :16].copy(), use_nvfp4=True), "x: expected a hidden size that is a multiple of 32 with use_nvfp4"),
            (lambda: decode(most=2**31 - 1), "num_max_dispatch_tokens_per_rank: expected an integer from 1 to 16777216"),
            (lambda: decode(experts=2**31 - 1), "num_experts: expected an integer from 1 to 1048576"),
            (lambda: decode(most=4), "x: 5 tokens, but num_max_dispatch_tokens_per_rank = 4"),
            (lambda: decode(x=x.astype(np.float32), use_fp8=False), "x: expected bfloat16 with use_fp8=False, got float32"),
            (lambda: buffer.low_latency_combine(recv, ids, weights, low_latency_handle, out=np.zeros((5, 8), bf16)), "out: expected"),
        ]:
            with pytest.raises(ferry.UsageError, match=words):
                call()


def test_more_rows_than_num_worst_tokens(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        received = len(messages_to(step, me))
        with pytest.raises(ferry.OverflowError, match=f"num_worst_tokens = 1, but rank 1 is sent {len(messages_to(step, 1))} rows"):
            layout_and_dispatch(buffer, step, me, num_worst_tokens=1 if me else received)
        assert len(layout_and_dispatch(buffer, step, me, num_worst_tokens=received)[0]) == received


def bad_calls():
    """name -> a call of a rank's own that the other ranks make as it should be."""
    return {
        "x": lambda b, s, me: layout_and_dispatch(b, s, me, x=s.tokens[me].astype(np.float32)),
        "x of one dimension": lambda b, s, me: layout_and_dispatch(b, s, me, x=s.tokens[me][0]),
        "no array": lambda b, s, me: layout_and_dispatch(b, s, me, x=[]),
        "scales": lambda b, s, me: layout_and_dispatch(b, s, me, x=(s.tokens[me].astype(np.int8), np.ones(3))),
        "no routes": lambda b, s, me: b.dispatch(s.tokens[me]),
        "ids": lambda b, s, me: layout_and_dispatch(b, s, me, topk_idx=s.ids[me].astype(np.float32)),
        "weights": lambda b, s, me: layout_and_dispatch(b, s, me, topk_weights=s.weights[me][:1]),
        "alignment": lambda b, s, me: layout_and_dispatch(b, s, me, expert_alignment=0),
        "worst": lambda b, s, me: layout_and_dispatch(b, s, me, num_worst_tokens=-5),
        "overlap": lambda b, s, me: layout_and_dispatch(b, s, me, allocate_on_comm_stream=True),
        "a fraction of alignment": lambda b, s, me: layout_and_dispatch(b, s, me, expert_alignment=1.5),
        "a fraction of a row": lambda b, s, me: layout_and_dispatch(b, s, me, num_worst_tokens=3.5),
        "config": lambda b, s, me: layout_and_dispatch(b, s, me, config=7),
        "odd SMs": lambda b, s, me: layout_and_dispatch(b, s, me, config=deep_ep.Config(21)),
        "event": lambda b, s, me: layout_and_dispatch(b, s, me, previous_event=7),
        "async_finish": lambda b, s, me: layout_and_dispatch(b, s, me, async_finish=np.ones(2)),
        "x that raises": lambda b, s, me: layout_and_dispatch(b, s, me, x=Interrupted()),
        "counts": lambda b, s, me: layout_and_dispatch(b, s, me, num_tokens_per_expert=np.zeros(16, object)),
    }


RAISED = {"async_finish": ValueError, "x that raises": KeyboardInterrupt}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", bad_calls())
def test_a_bad_dispatch_ends_on_all_ranks(rng, name, later):
    step, mistake = full_step(rng), bad_calls()[name]

    @on_ranks(2)
    def _(me, buffer):
        if later:  # otherwise it is the Buffer's first call
            layout_and_dispatch(buffer, step, me)
        with pytest.raises(RAISED.get(name, ferry.UsageError) if me else ferry.UsageError,
                           match=None if me else "rank 1 refused dispatch"):
            if me:
                mistake(buffer, step, me)
            else:
                layout_and_dispatch(buffer, step, me)
        assert [t for _, t in messages_to(step, me)] == layout_and_dispatch(buffer, step, me)[4][3].tolist()


@pytest.mark.parametrize("name", ["x", "overlap", "config", "odd SMs", "bias", "three biases", "bias of float32",
                                  "bias of objects", "weights", "again", "again with ids", "again with config"])
def test_bad_calls_by_a_handle_end_on_all_ranks(rng, name):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me)
        right = {"x": rows, "handle": handle, "topk_weights": weights, "bias": step.tokens[me]}
        wrong = {
            "x": {"x": rows.astype(np.float32)},
            "overlap": {"allocate_on_comm_stream": True},
            "config": {"config": 7},
            "odd SMs": {"config": deep_ep.Config(21)},
            "bias": {"bias": np.ones((1, HIDDEN), bf16)},
            "three biases": {"bias": (step.tokens[me],) * 3},
            "bias of float32": {"bias": step.tokens[me].astype(np.float32)},
            "bias of objects": {"bias": (step.tokens[me], step.tokens[me].astype(object))},
            "weights": {"topk_weights": weights.astype(np.float64)},
            "again": {"x": step.tokens[me].astype(np.float32)},
            "again with ids": {"topk_idx": step.ids[me]},
            "again with config": {"config": deep_ep.Config(7)},
        }[name]
        call = buffer.combine
        if name.startswith("again"):
            call, right = buffer.dispatch, {"x": step.tokens[me], "handle": handle}
        with pytest.raises(ferry.UsageError, match=None if me else "rank 1 refused"):
            call(**(right | wrong if me else right))
        assert same_bits(call(**right)[0], call(**right)[0])


def test_handles_of_other_calls(rng):
    step = full_step(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        for handle in (None, (1, 2, 3), low_latency(buffer, step, me)[2]):
            with pytest.raises(ferry.UsageError, match="handle: expected a handle of dispatch"):
                buffer.combine(step.tokens[0], handle)
        for handle in ((1, 2, 3), low_latency(buffer, step, me)[2]):
            with pytest.raises(ferry.UsageError, match="handle: expected a handle of dispatch"):
                buffer.dispatch(step.tokens[0], handle=handle)
        for handle in (None, (1, 2), layout_and_dispatch(buffer, step, me)[4]):
            with pytest.raises(ferry.UsageError, match="handle: expected a handle of low_latency_dispatch"):
                buffer.low_latency_combine(step.tokens[0], step.ids[0], step.weights[0], handle)
            with pytest.raises(ferry.UsageError, match="handle: expected a handle of low_latency_dispatch"):
                buffer.get_next_low_latency_combine_buffer(handle)


@pytest.mark.parametrize("bad", [16, 17, 2**40, -2])
def test_ids_out_of_range(rng, bad):
    step = full_step(rng)
    step.ids[1][2, 0] = bad

    @on_ranks(2)
    def _(me, buffer):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(step.ids[me], 16)
        assert per_expert.tolist() == [int((step.ids[me] == e).sum()) for e in range(16)]
        assert in_rank.tolist() == [[any(i // 8 == r for i in row if 0 <= i < 16) for r in range(2)]
                                    for row in step.ids[me].tolist()]
        with pytest.raises(ferry.BadIdError) if me else contextlib.nullcontext():
            layout_and_dispatch(buffer, step, me)
        with pytest.raises(ferry.UsageError, match="topk_idx"):
            buffer.get_dispatch_layout(step.ids[me][0], 16)


def test_zero_copy_reads_the_buffer(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        recv, counts, handle, _, hook = low_latency(buffer, step, me, use_fp8=False, return_recv_hook=True)
        room = buffer.get_next_low_latency_combine_buffer(handle)
        hook()
        given = (step.ids[me], step.weights[me], handle)
        expected = buffer.low_latency_combine(recv, *given)[0]
        room[...] = recv
        assert same_bits(buffer.low_latency_combine(np.full_like(recv, 9), *given, zero_copy=True)[0], expected)


def test_combine_skips_masked_slots(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        recv, _, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        masked = np.where(np.arange(3) == 1, -1, step.ids[me])
        y = buffer.low_latency_combine(recv, masked, step.weights[me], handle)[0]
        weights = np.where(masked >= 0, step.weights[me], np.float32(0))
        assert same_bits(y, buffer.low_latency_combine(recv, step.ids[me], weights, handle)[0])


def test_the_number_of_channels(rng):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        *_, handle, _ = layout_and_dispatch(buffer, step, me, config=deep_ep.Config(8, 6, 256))
        assert handle[1].shape == handle[2].shape == (2, 4)


def test_a_rank_without_experts():
    def body(rank):
        buffer = deep_ep.Buffer(rank)
        x, ids, weights = np.ones((2, HIDDEN), bf16), np.zeros((2, 1), np.int64), np.ones((2, 1), np.float32)
        handle = buffer.low_latency_dispatch(x, ids, 4, 1, use_fp8=False)[2]
        assert handle[0].shape == (1 - rank.index, 8) and handle[1].shape == (1 - rank.index, 2)

    ferry.Group.threads(2).run(body)


def test_use_after_destroy(rng):
    step = full_step(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        recv, _, low_latency_handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        *_, hook = low_latency(buffer, step, me, use_fp8=False, return_recv_hook=True)
        layout = buffer.get_dispatch_layout(step.ids[0], 16)
        buffer.destroy()
        for call in (
            hook,
            lambda: buffer.get_dispatch_layout(step.ids[0], 16),
            lambda: buffer.dispatch(step.tokens[0], None, layout[0], None, layout[3], layout[2]),
            lambda: buffer.dispatch(step.tokens[0], handle),
            lambda: buffer.combine(rows, handle),
            lambda: low_latency(buffer, step, me),
            lambda: buffer.low_latency_combine(recv, step.ids[0], step.weights[0], low_latency_handle),
            lambda: buffer.get_next_low_latency_combine_buffer(low_latency_handle),
            lambda: buffer.clean_low_latency_buffer(1, HIDDEN, 16),
            lambda: buffer.low_latency_query_mask_buffer(np.zeros(1, np.int32)),
            buffer.low_latency_clean_mask_buffer,
            buffer.get_comm_stream,
        ):
            with pytest.raises(ferry.UsageError, match="destroy"):
                call()
        buffer.destroy()


@pytest.mark.parametrize("wrong", [None, "many", [1], np.zeros(3), 2**63, float("inf")], ids=str)
def test_a_size_that_is_no_integer_is_refused_on_every_rank(wrong):
    def body(rank):
        with pytest.raises(ferry.UsageError, match="Buffer: num_rdma_bytes: expected an integer, got "):
            deep_ep.Buffer(rank, 0, wrong if rank.index else int(1e9))
        return deep_ep.Buffer(rank, 0, int(1e9)).num_rdma_bytes

    assert ferry.Group.threads(2, 2).run(body) == [int(1e9)] * 2


def displaced(array):
    """A copy whose address is 8 bytes behind a multiple of 16."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    begin = 8 - memory.ctypes.data % 16 + 16
    copy = memory[begin:begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_addresses_are_refused_by_the_name_of_the_argument(rng):
    step = full_step(rng, 2)

    @on_ranks(2)
    def _(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        recv, _, low_latency_handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        x, y = step.tokens[me], np.zeros_like(step.tokens[me])

        def placed(array):
            return displaced(array) if me else array

        def low_latency_combine(x, out):
            return buffer.low_latency_combine(x, step.ids[me], step.weights[me], low_latency_handle, out=out)

        for call, name in ((lambda: layout_and_dispatch(buffer, step, me, placed(x)), "x"), (lambda: buffer.dispatch(placed(x), handle), "x"),
                           (lambda: buffer.combine(placed(rows), handle), "x"), (lambda: low_latency_combine(placed(recv), y), "x"),
                           (lambda: low_latency_combine(recv, placed(y)), "out"),
                           (lambda: buffer.low_latency_dispatch(placed(x), step.ids[me], 9, 16, use_fp8=False), "x")):
            with pytest.raises(ferry.UsageError, match=rf"\b{name}: address .* on rank 1 is not a multiple of 16"):
                call()
        assert same_bits(buffer.dispatch(x, handle)[0], rows)


def test_num_worst_tokens_on_one_rank(rng):
    step = full_step(rng, 2)

    @on_ranks(2)
    def _(me, buffer):
        rows, *_ = layout_and_dispatch(buffer, step, me)
        with pytest.raises(ferry.UsageError, match="dispatch of new routes without num_worst_tokens on rank 1"):
            layout_and_dispatch(buffer, step, me, num_worst_tokens=0 if me else 10)
        again, *_ = layout_and_dispatch(buffer, step, me, num_worst_tokens=10)
        assert len(again) == 10 and same_bits(again[: len(rows)], rows)  # the rows after them are undefined


def test_a_bias_that_is_no_plain_array_counts_by_its_values(rng):
    """What NumPy's masked arrays raise must not end the call of one rank, while the peers add their weights."""
    step = full_step(rng, 2)

    @on_ranks(2)
    def _(me, buffer):
        rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me, topk_idx=step.ids[me], topk_weights=step.weights[me])
        bias = np.ma.masked_array(step.tokens[me], np.zeros(step.tokens[me].shape, bool))
        bias.tobytes()  # gives it a fill value, which has no float32
        results = [buffer.combine(rows, handle, topk_weights=weights, bias=term)[:2] for term in (step.tokens[me], bias if me else step.tokens[me])]
        assert all(same_bits(plain, masked) for plain, masked in zip(*results))


def test_bad_arguments_of_hints_and_queries():
    config, hint = deep_ep.Config(), deep_ep.Buffer.get_low_latency_rdma_size_hint
    sizes = (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint)
    for call, arguments, text in (
        *((size, ("a", 8), "hidden_bytes: expected an integer from 0 to 2147483647, got 'a'") for size in sizes),
        *((size, (-1, 8), "hidden_bytes: .* got -1") for size in sizes),
        *((size, (256, None), "num_ranks: expected an integer from 1 to 2147483647, got None") for size in sizes),
        (hint, ("a", 256, 2, 4), "num_max_dispatch_tokens_per_rank: expected an integer from 1 to 2147483647, got 'a'"),
        (hint, (8, 256, 0, 4), "num_ranks: .* got 0"),
        (hint, (8, 256, 2, -1), "num_experts: .* got -1"),
        (deep_ep.Buffer.set_num_sms, ("x",), "set_num_sms: new_num_sms: .* got 'x'"),
    ):
        with pytest.raises(ferry.UsageError, match=text):
            call(*arguments)

    @on_ranks(2)
    def _(me, buffer):
        for mask, text in ((None, "mask_status: cannot be read: "), (np.zeros(3, np.int32), r"mask_status: expected int32 of shape \[2\], got int32 of shape \[3\]"),
                           (np.zeros(2, np.int64), "mask_status: .* got int64"), (np.broadcast_to(np.int32(0), 2), "mask_status: .*read-only")):
            with pytest.raises(ferry.UsageError, match=text):
                buffer.low_latency_query_mask_buffer(mask)


class Threads:
    """A communicator of threads, as mpi4py has one of processes."""

    def __init__(self, rank, parts, barrier):
        self.rank, self.parts, self.barrier = rank, parts, barrier

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return len(self.parts)

    def allgather(self, mine):
        self.parts[self.rank] = mine
        self.Barrier()
        gathered = list(self.parts)
        self.Barrier()
        return gathered

    def Barrier(self):
        self.barrier.wait(60)


def test_a_communicator_has_the_deadline_of_calls(rng, monkeypatch):
    monkeypatch.setattr(_exchanges, "DEADLINE", 0.3)
    step, parts, barrier, over = full_step(rng), [None] * 2, threading.Barrier(2), threading.Event()
    found = []

    def body(me):
        buffer = deep_ep.Buffer(None, comm=Threads(me, parts, barrier), explicitly_destroy=True)
        if me:
            over.wait(60)  # exists, but does not take part
            return
        try:
            begin = time.monotonic()
            layout_and_dispatch(buffer, step, me)
        except ferry.TimeoutError:
            found.append(time.monotonic() - begin)
        finally:
            over.set()

    ranks = [threading.Thread(target=body, args=(me,)) for me in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert len(found) == 1 and 0.3 <= found[0] < 20


def test_a_synchronous_call_has_no_event(rng):
    step = full_step(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        *_, handle, event = layout_and_dispatch(buffer, step, me)
        events = [event, buffer.dispatch(step.tokens[0], handle=handle)[-1], low_latency(buffer, step, me)[3]]
        assert all(event.event is None for event in events)
        with pytest.raises(AssertionError, match="not asynchronous"):
            events[-1].current_stream_wait()


def test_tensors_with_gradients(rng):
    torch = pytest.importorskip("torch")
    step = full_step(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        x = torch.tensor(step.tokens[0].astype(np.float32)).bfloat16().requires_grad_()
        ids, weights = torch.tensor(step.ids[0]), torch.tensor(step.weights[0]).requires_grad_()
        tensors = type(step)(16, 3, [x], [ids], [weights])
        rows, _, theirs, _, handle, _ = layout_and_dispatch(buffer, tensors, 0)
        y, w, _ = buffer.combine(rows.requires_grad_(), handle, topk_weights=theirs.requires_grad_(), bias=x)
        recv, _, handle, *_ = low_latency(buffer, tensors, 0, use_fp8=False)
        z = buffer.low_latency_combine(recv.requires_grad_(), ids, weights, handle)[0]
        assert not any(tensor.requires_grad for tensor in (y, w, z))
