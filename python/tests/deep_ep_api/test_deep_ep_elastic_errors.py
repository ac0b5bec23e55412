"""ElasticBuffer given wrong arguments, other handles, different calls on different ranks: every rank gets an error, and goes on."""

import contextlib

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, Interrupted, fp8, full_step
from ferry.deep_ep._exchanges import CALLS
from oracle import bf16, messages_to, same_bits

EXPERTS = {"num_experts": 16}


def on_ranks(ranks, body, **settings):
    settings = {"num_max_tokens_per_rank": 8, "explicitly_destroy": True, "num_gpu_timeout_secs": 20} | settings
    ferry.Group.threads(ranks).run(lambda rank: body(rank.index, deep_ep.ElasticBuffer(rank, **settings)))


def dispatch(buffer, step, me, **settings):
    given = {"x": step.tokens[me], "topk_idx": step.ids[me], "topk_weights": step.weights[me]} | EXPERTS
    return buffer.dispatch(**(given | settings))


BAD_DISPATCHES = {
    "x of float32": lambda s: {"x": s.tokens[1].astype(np.float32)},
    "x of one dimension": lambda s: {"x": s.tokens[1][0]},
    "x of 12 columns": lambda s: {"x": s.tokens[1][:, :12].copy()},
    "three arrays": lambda s: {"x": (s.tokens[1],) * 3},
    "no array": lambda s: {"x": []},
    "a list of numbers": lambda s: {"x": [1.0, 2.0]},
    "scales": lambda s: {"x": (s.tokens[1].astype(fp8), np.ones((5, 65), np.float32))},
    "scales of another length": lambda s: {"x": (s.tokens[1].astype(fp8), np.ones((4, 2), np.float32))},
    "no ids": lambda s: {"topk_idx": None},
    "ids of float32": lambda s: {"topk_idx": s.ids[1].astype(np.float32)},
    "ids of other tokens": lambda s: {"topk_idx": s.ids[1][:2]},
    "33 slots": lambda s: {"topk_idx": np.zeros((5, 33), np.int64)},
    "weights": lambda s: {"topk_weights": s.weights[1][:1]},
    "weights of float64": lambda s: {"topk_weights": s.weights[1].astype(np.float64)},
    "no experts": lambda s: {"num_experts": None},
    "a fraction of an expert": lambda s: {"num_experts": 1.5},
    "alignment": lambda s: {"expert_alignment": 0},
    "num_sms": lambda s: {"num_sms": -1},
    "num_max_tokens_per_rank": lambda s: {"num_max_tokens_per_rank": 4},
    "stats": lambda s: {"cumulative_local_expert_recv_stats": np.zeros(7, np.int32)},
    "padding": lambda s: {"do_zero_padding": True},
    "event": lambda s: {"previous_event": 7},
    "later event": lambda s: {"previous_event_before_epilogue": 7},
    "x that raises": lambda s: {"x": Interrupted()},
    "an unknown argument": lambda s: {"num_expert": 16},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_a_bad_dispatch_ends_on_all_ranks(rng, name, later):
    step = full_step(rng)

    def body(me, buffer):
        if later:  # otherwise it is the first call
            dispatch(buffer, step, me)
        raised = KeyboardInterrupt if me and name == "x that raises" else ferry.UsageError
        with pytest.raises(raised, match=None if me else "rank 1 refused dispatch"):
            dispatch(buffer, step, me, **(BAD_DISPATCHES[name](step) if me else {}))
        tokens = dispatch(buffer, step, me)[3].recv_src_metadata[:, 0] % 8
        assert tokens.tolist() == [token for _, token in messages_to(step, me)]

    on_ranks(2, body)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", ["x", "fewer rows", "more rows", "bias", "three biases", "weights", "weights alone", "num_sms", "event",
                                  "again", "again with ids", "again with sync", "again of another layout", "again with experts",
                                  "again with weights"])
def test_bad_calls_by_a_handle_end_on_all_ranks(rng, name, expand):
    step = full_step(rng)

    def body(me, buffer):
        rows, _, weights, handle, _ = dispatch(buffer, step, me, do_expand=expand)
        right = {"x": rows, "handle": handle, "topk_weights": weights, "bias": step.tokens[me]}
        wrong = {
            "x": {"x": rows.astype(np.float32)},
            "fewer rows": {"x": rows[:-1], "topk_weights": weights[:-1]},
            "more rows": {"x": np.concatenate([rows, rows]), "topk_weights": np.concatenate([weights, weights])},
            "bias": {"bias": np.ones((1, HIDDEN), bf16)},
            "three biases": {"bias": (step.tokens[me],) * 3},
            "weights": {"topk_weights": weights.astype(np.float64)},
            "weights alone": {"topk_weights": weights[:-1]},
            "num_sms": {"num_sms": "all"},
            "event": {"previous_event": 7},
            "again": {"x": step.tokens[me][:2]},
            "again with ids": {"topk_idx": step.ids[me]},
            "again with sync": {"do_cpu_sync": True},
            "again of another layout": {"do_expand": not expand},
            "again with experts": {"num_experts": 8},
            "again with weights": {"topk_weights": step.weights[me][:1]},
        }[name]
        call = buffer.combine
        if name.startswith("again"):
            call, right = buffer.dispatch, {"x": step.tokens[me], "handle": handle, "do_expand": expand}
        with pytest.raises(ferry.UsageError, match=None if me else "rank 1 refused"):
            call(**(right | wrong if me else right))
        assert same_bits(call(**right)[0], call(**right)[0])

    on_ranks(2, body)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_other_handles(rng, operation):
    step = full_step(rng)

    def body(me, buffer):
        rows, *_, handle, _ = dispatch(buffer, step, me)
        other = deep_ep.ElasticBuffer(buffer.group, num_max_tokens_per_rank=8)
        theirs = dispatch(other, step, me)[3]
        call = buffer.dispatch if operation == "dispatch" else buffer.combine
        x = step.tokens[me] if operation == "dispatch" else rows
        for wrong, text in ((theirs, "of another ElasticBuffer"), ((1, 2, 3), "expected an EPHandle that dispatch returned, got tuple")):
            with pytest.raises(ferry.UsageError, match=text if me else "rank 1 refused .*handle: "):
                call(x, handle=wrong if me else handle)
        if operation == "combine":
            with pytest.raises(ferry.UsageError, match="got NoneType" if me else "rank 1 refused"):
                buffer.combine(rows, None if me else handle)
        assert same_bits(call(x, handle=handle)[0], call(x, handle=handle)[0])

    on_ranks(2, body)


def test_a_handle_of_buffer_is_refused(rng):
    step = full_step(rng, 1)

    def body(me, elastic):
        buffer = deep_ep.Buffer(elastic.group)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(step.ids[0], 16)
        rows, *_, handle, _ = buffer.dispatch(step.tokens[0], None, per_rank, None, in_rank, per_expert)
        with pytest.raises(ferry.UsageError, match="handle: expected an EPHandle that dispatch returned, got NormalHandle"):
            elastic.combine(rows, handle)
        with pytest.raises(ferry.UsageError, match="handle: expected a handle of dispatch, got .*EPHandle"):
            buffer.combine(rows, dispatch(elastic, step, 0)[3])

    on_ranks(1, body)


DIFFERENT = {
    "num_experts": ({"num_experts": 32}, "num_experts is 16 on rank 0 and 32 on rank 1"),
    "expert_alignment": ({"expert_alignment": 4, "do_expand": True}, "do_expand is 0 on rank 0 and 1 on rank 1"),
    "num_max_tokens_per_rank": ({"num_max_tokens_per_rank": 64}, "num_max_tokens_per_rank is 8 on rank 0 and 64 on rank 1"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_arguments_that_differ_between_ranks(rng, name):
    step, (different, text) = full_step(rng), DIFFERENT[name]

    def body(me, buffer):
        with pytest.raises(ferry.UsageError, match=text):
            dispatch(buffer, step, me, **(different if me else {}))
        dispatch(buffer, step, me)
        text_then = "rank 0 is in a dispatch of ElasticBuffer, rank 1 in the first dispatch of a shape of ElasticBuffer"
        with pytest.raises(ferry.UsageError, match=text_then):
            dispatch(buffer, step, me, **(different if me else {}))
        dispatch(buffer, step, me)
        dispatch(buffer, step, me, do_expand=True)

    on_ranks(2, body)


def test_weights_and_scales_that_differ_between_ranks(rng):
    step = full_step(rng)

    def body(me, buffer):
        with pytest.raises(ferry.UsageError, match="topk_weights given .* is (true|false) on rank"):
            dispatch(buffer, step, me, do_expand=True, **({"topk_weights": None} if me else {}))
        quantised = (step.tokens[me].astype(fp8), np.ones((5, 2), np.float32))
        with pytest.raises(ferry.UsageError, match="x is .*a tuple of values and scales on rank 1"):
            dispatch(buffer, step, me, **({"x": quantised} if me else {}))
        rows, _, weights, handle, _ = dispatch(buffer, step, me, do_expand=True)
        with pytest.raises(ferry.UsageError, match="topk_weights given on rank 0 and not on rank 1"):
            buffer.combine(rows, handle, None if me else weights)
        assert same_bits(buffer.combine(rows, handle, weights)[1], step.weights[me])

    on_ranks(2, body)


def test_a_bad_dispatch_while_peers_are_in_another_call(rng):
    step = full_step(rng)

    def body(me, buffer):
        rows, _, weights, handle, _ = dispatch(buffer, step, me)
        for call in (lambda: dispatch(buffer, step, 0, num_experts=32), lambda: buffer.combine(rows, handle, weights), buffer.barrier,
                     lambda: buffer.dispatch(step.tokens[0], handle=handle)):
            with pytest.raises(ferry.UsageError, match="x: expected bfloat16" if me else "rank 1 refused dispatch: x: expected bfloat16"):
                dispatch(buffer, step, me, x=step.weights[1]) if me else call()
        assert same_bits(buffer.combine(rows, handle, weights)[1], step.weights[me])
        dispatch(buffer, step, me, num_experts=32)

    on_ranks(2, body)


@pytest.mark.parametrize("first", ["combine", "first dispatch", "first combine with weights", "all_gather"])
def test_ranks_in_different_calls(rng, first):
    step = full_step(rng)

    def body(me, buffer):
        buffer.agrs_set_config(1 << 20, 9)
        rows, _, weights, handle, _ = dispatch(buffer, step, me)
        expanded = dispatch(buffer, step, me, do_expand=True)
        calls = {
            "combine": (lambda: dispatch(buffer, step, me), lambda: buffer.combine(rows, handle)),
            "first dispatch": (lambda: buffer.combine(expanded[0], expanded[3]), lambda: dispatch(buffer, step, me, num_experts=32)),
            "first combine with weights": (lambda: dispatch(buffer, step, me, num_experts=32), lambda: buffer.combine(rows, handle, weights)),
            "all_gather": (lambda: dispatch(buffer, step, me, do_expand=True), lambda: buffer.all_gather(step.weights[me])),
        }[first]
        with buffer.agrs_new_session(), pytest.raises(ferry.UsageError, match="is in .*, rank 1 in |of the lane is"):
            calls[me]()
        for expand in (False, True):  # the other exchanges of all ranks are at the same call, too
            assert same_bits(dispatch(buffer, step, me, do_expand=expand)[0], expanded[0] if expand else rows)
        with buffer.agrs_new_session():
            for call in calls:
                call()

    on_ranks(2, body)


def test_two_interfaces_on_one_group(rng):
    step = full_step(rng)

    def body(rank):
        made = deep_ep.ElasticBuffer if rank.index else deep_ep.Buffer
        with pytest.raises(ferry.UsageError, match="rank 0 is in the constructor of Buffer, rank 1 in the constructor of ElasticBuffer"):
            made(rank)
        buffer, elastic = deep_ep.Buffer(rank), deep_ep.ElasticBuffer(rank, num_max_tokens_per_rank=8)
        me = rank.index
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(step.ids[me], 16)

        def of_buffer():
            return buffer.dispatch(step.tokens[me], None, per_rank, None, in_rank, per_expert, step.ids[me], step.weights[me])[0]

        with pytest.raises(ferry.UsageError, match="a dispatch without a handle, rank 1 in the first dispatch of a shape of ElasticBuffer"):
            dispatch(elastic, step, me) if me else of_buffer()
        for _ in range(2):
            assert same_bits(of_buffer(), dispatch(elastic, step, me)[0])

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("bad", [16, 2**40, -2])
@pytest.mark.parametrize("expand", [False, True])
def test_ids_out_of_range(rng, bad, expand):
    step = full_step(rng)
    step.ids[1][2, 0] = bad

    def body(me, buffer):
        with pytest.raises(ferry.BadIdError) if me else contextlib.nullcontext():
            dispatch(buffer, step, me, do_expand=expand)
        step.ids[me][...] = np.arange(3)
        dispatch(buffer, step, me, do_expand=expand)

    on_ranks(2, body)


def test_more_rows_than_there_is_room_for(rng):
    step = full_step(rng)
    for ids in step.ids:
        ids[...] = 1  # three routes of each of ten tokens to an expert that has room for each token once

    def body(me, buffer):
        for sync in (False, True):
            with pytest.raises(ferry.OverflowError, match="rank 1 is sent 30 rows, but num_max_tokens_per_rank = 5 has room for 10: a token"):
                dispatch(buffer, step, me, num_experts=2, do_expand=True, do_cpu_sync=sync)
        rows, ids, *_ = dispatch(buffer, step, me, num_experts=2)
        assert len(rows) == 10 * me and (ids == 0).all()

    on_ranks(2, body, num_max_tokens_per_rank=5)


@pytest.mark.parametrize("name, wrong", [("num_cpu_bytes", 1), ("num_max_tokens_per_rank", -1), ("hidden", 1.5), ("num_gpu_timeout_secs", 0),
                                         ("num_byte", 4)])
def test_a_bad_constructor_ends_on_all_ranks(name, wrong):
    def body(rank):
        with pytest.raises(ferry.Error, match=name.removesuffix("_secs").removeprefix("num_gpu_") if rank.index else
                           "rank 1 refused the constructor"):
            deep_ep.ElasticBuffer(rank, **({name: wrong} if rank.index else {}))
        deep_ep.ElasticBuffer(rank)

    ferry.Group.threads(2).run(body)


def test_settings_that_differ_between_ranks():
    def body(rank):
        with pytest.raises(ferry.UsageError, match="allow_multiple_reduction is [01] on rank"):
            deep_ep.ElasticBuffer(rank, allow_multiple_reduction=bool(rank.index))
        with pytest.raises(ferry.UsageError, match="num_max_tokens_per_rank is [48] on rank"):
            deep_ep.ElasticBuffer(rank, num_max_tokens_per_rank=4 + 4 * rank.index)

    ferry.Group.threads(2).run(body)


def test_sessions_of_all_gather(rng):
    mine = np.ones((4, 4), np.float32)

    def body(me, buffer):
        with pytest.raises(ferry.UsageError, match="needs an open session"):
            buffer.all_gather(mine)
        with pytest.raises(ferry.UsageError, match="num_max_session_bytes: expected an integer from 1"):
            buffer.agrs_set_config(0, 1)
        buffer.agrs_set_config(2 * mine.nbytes, 1)
        with pytest.raises(ferry.UsageError, match="destroy_agrs_session: no session is open"):
            buffer.destroy_agrs_session()
        with buffer.agrs_new_session():
            with pytest.raises(ferry.UsageError, match="create_agrs_session: a session is open"):
                buffer.create_agrs_session()
            with pytest.raises(ferry.UsageError, match="at most 1 calls and 128 bytes|rank 1 refused all_gather"):
                buffer.all_gather((mine, mine) if me else mine)
            with pytest.raises(ferry.UsageError, match="expected tensors or arrays, got list|rank 1 refused all_gather"):
                buffer.all_gather([[1.0]] if me else mine)
        with buffer.agrs_new_session():
            buffer.all_gather(mine)
            with pytest.raises(ferry.UsageError, match="call 2 of the session"):
                buffer.all_gather(mine)

    on_ranks(2, body)


def test_use_after_destroy(rng):
    step = full_step(rng, 1)

    def body(me, buffer):
        rows, *_, handle, _ = dispatch(buffer, step, me)
        buffer.destroy()
        buffer.destroy()
        for call in (lambda: dispatch(buffer, step, me), lambda: buffer.dispatch(step.tokens[0], handle=handle), buffer.barrier,
                     lambda: buffer.combine(rows, handle), lambda: buffer.all_gather(rows), lambda: buffer.agrs_set_config(1, 1),
                     buffer.create_agrs_session, lambda: buffer.agrs_get_inplace_tensor((1,), np.dtype(np.int8))):
            with pytest.raises(ferry.UsageError, match=r"ElasticBuffer: used after destroy\(\)"):
                call()

    on_ranks(1, body)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        ferry.Group.threads(1).run(lambda rank: deep_ep.ElasticBuffer(rank).destroy())


def test_every_call_has_a_name():
    assert len(set(CALLS)) == len(CALLS) and sum("ElasticBuffer" in call for call in CALLS) == 6
