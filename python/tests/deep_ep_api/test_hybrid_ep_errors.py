"""Errors of HybridEPBuffer: typed, in the words of the interface, on every rank at once, and the next call works."""

import threading
import time

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import Interrupted, fp8
from ferry.deep_ep import _exchanges
from hybrid_steps import HIDDEN, Steps, buffer_of, random_case
from oracle import bf16


@pytest.fixture
def case(rng):
    """Five tokens on each of two ranks, of at least one expert on each."""
    case = random_case(rng, 2, most=1)
    maps = [rng.random((5, 8)) < 0.5 for _ in range(2)]
    for routing_map in maps:
        routing_map[:, ::4] = True
    probs = [np.where(m, rng.random(m.shape, np.float32), np.float32(0)) for m in maps]
    return type(case)(case.nodes, case.local, maps, probs, [rng.standard_normal((5, HIDDEN)).astype(bf16) for _ in range(2)])


def run(case, body):
    """Calls body(steps) as every rank."""
    return ferry.Group.threads(case.ranks).run(lambda rank: body(Steps(case, rank.index, buffer_of(rank, case))))


DISPATCHES = [
    (lambda s: {"hidden": s.x.astype(np.float32)}, r"hidden: expected bfloat16 or float8_e4m3fn or uint8 of shape \[any, any\], got float32 of shape \[5, 256\]"),
    (lambda s: {"hidden": s.x[0]}, r"hidden: expected .* got bfloat16 of shape \[256\]"),
    (lambda s: {"hidden": s.x[:, :100]}, "hidden: expected a multiple of 8 columns, got 100"),
    (lambda s: {"hidden": None}, "hidden: expected an array of the framework and device of hidden, got NoneType"),
    (lambda s: {"hidden": s.x.astype(fp8)}, r"scaling_factor: fp8 rows need it, float32 \[5, 2\]"),
    (lambda s: {"hidden": s.x.astype(fp8), "scaling_factor": np.ones((5, 3), np.float32)},
     r"scaling_factor: expected float32 of shape \[5, 2\], got float32 of shape \[5, 3\]"),
    (lambda s: {"routing_map": None}, "without a handle pass routing_map or topk_idx"),
    (lambda s: {"routing_map": s.map.astype(np.int32)}, r"routing_map: expected bool of shape \[5, any\], got int32 of shape \[5, 8\]"),
    (lambda s: {"routing_map": s.map[:4]}, r"routing_map: expected bool of shape \[5, any\], got bool of shape \[4, 8\]"),
    (lambda s: {"routing_map": s.map[:, :6], "probs": None}, "routing_map: expected 4 experts on each of 2 ranks, got 6"),
    (lambda s: {"routing_map": s.map.tolist()}, "routing_map: expected an array"),
    (lambda s: {"probs": s.probs.astype(np.float64)}, r"probs: expected float32 of shape \[5, 8\], got float64 of shape \[5, 8\]"),
    (lambda s: {"probs": s.probs[:, :3]}, r"probs: expected float32 of shape \[5, 8\], got float32 of shape \[5, 3\]"),
    (lambda s: {"routing_map": None, "topk_idx": np.zeros((5, 2), np.int64)}, "num_of_experts: expected with topk_idx"),
    (lambda s: {"routing_map": None, "topk_idx": np.full((5, 2), 8), "num_of_experts": 8},
     "topk_idx: token 0 has 8 in slot 0, must be from -1 to 7"),
    (lambda s: {"routing_map": None, "topk_idx": np.zeros((5, 2), np.int64), "topk_weights": np.zeros((5, 1), np.float32),
                "num_of_experts": 8}, r"topk_weights: expected float32 of shape \[5, 2\], got float32 of shape \[5, 1\]"),
    (lambda s: {"nonsense": 1}, "dispatch.*: there is no argument 'nonsense'"),
]
PERMUTED = [
    (lambda s: {"use_fp8": True}, "use_fp8 is True, but hidden is bfloat16"),
    (lambda s: {"non_blocking": True}, "num_permuted_tokens: expected with non_blocking"),
    (lambda s: {"non_blocking": True, "num_permuted_tokens": -1}, "num_permuted_tokens: expected an integer from 0 to 2147483647, got -1"),
    (lambda s: {"non_blocking": True, "num_permuted_tokens": 10, "pad_multiple": 4},
     "num_permuted_tokens = 10, must be a multiple of pad_multiple = 4"),
    (lambda s: {"num_permuted_tokens": "x"}, "num_permuted_tokens: expected an integer from 0 .* got 'x'"),
    (lambda s: {"pad_multiple": 1.5}, "pad_multiple: expected an integer from 0 .* got 1.5"),
    (lambda s: {"num_of_experts_per_rank": 3}, "routing_map: expected 3 experts on each of 2 ranks, got 8"),
]


def dispatch(steps, permuted, **changed):
    method = steps.buffer.dispatch_with_permute if permuted else steps.buffer.dispatch
    return method(**{"hidden": steps.x, "routing_map": steps.map, "probs": steps.probs} | changed)


@pytest.mark.parametrize("first", [True, False])
def test_one_ranks_arguments_of_a_dispatch(case, first):
    """In the buffer's first call and in later ones; the peers' call ends at once with the same text."""

    def body(steps):
        def refused(call, text):
            with pytest.raises(ferry.UsageError, match=text) as caught:
                call()
            assert steps.me == 1 or "rank 1 refused" in str(caught.value) or "refused by rank 1" in str(caught.value)

        for permuted, changes, text in [(False, *each) for each in DISPATCHES] + [(True, *each) for each in DISPATCHES + PERMUTED]:
            if not first:
                dispatch(steps, permuted)
            blocking = {} if not permuted or "non_blocking" not in changes(steps) else {"non_blocking": True, "num_permuted_tokens": 64}
            given = changes(steps) if steps.me else blocking
            refused(lambda: dispatch(steps, permuted, **given), text if steps.me else ".")
        steps.check_permuted(4)
        steps.check_plain()

    started = time.monotonic()
    run(case, body)
    assert time.monotonic() - started < 20  # no call waited for the deadline


def test_one_ranks_arguments_by_a_handle(case):
    def body(steps):
        rows, probs, *_, the_permuted = dispatch(steps, True, pad_multiple=4)
        plain_rows, plain_probs, _, plain = dispatch(steps, False)
        buffer, me = steps.buffer, steps.me

        def once(handle, rows, probs, permuted):
            """(call, a change of one rank's arguments, its error)"""
            combine = buffer.combine_with_unpermute if permuted else buffer.combine
            again = buffer.dispatch_with_permute if permuted else buffer.dispatch
            ours = {"hidden": rows, "probs": probs, "handle": handle}
            yield combine, ours, {"hidden": rows[:-1]}, rf"hidden: expected bfloat16 of shape \[{len(rows)}, 256\], got bfloat16 of shape \[{len(rows) - 1}, 256\]"
            yield combine, ours, {"hidden": rows.astype(np.float32)}, "hidden: expected bfloat16"
            yield combine, ours, {"probs": probs[:-1]}, "probs: expected float32"
            yield combine, ours, {"handle": None}, "handle: expected what a dispatch of this buffer returned, got NoneType"
            yield combine, ours, {"handle": tuple(handle)}, "got tuple"
            yield combine, ours, {"handle": plain if permuted else the_permuted}, f"handle: it has {7 if permuted else 11} elements"
            theirs = {"hidden": steps.x, "handle": handle}
            yield again, theirs, {"hidden": steps.x[:3]}, r"hidden: expected .* \[5, 256\], got bfloat16 of shape \[3, 256\]"
            yield again, theirs, {"hidden": steps.x[:, :128]}, r"hidden: expected .* \[5, 256\], got bfloat16 of shape \[5, 128\]"
            yield again, theirs, {"handle": 5}, "handle: expected what a dispatch of this buffer returned, got int"
            if permuted:
                yield again, theirs, {"num_permuted_tokens": len(rows) + 4}, f"num_permuted_tokens = {len(rows) + 4}, but the dispatch of the handle has"
                yield again, theirs, {"pad_multiple": 8}, "pad_multiple = 8, but the dispatch of the handle has 4"

        for permuted, ours in ((True, (the_permuted, rows, probs)), (False, (plain, plain_rows, plain_probs))):
            for call, given, changes, text in once(*ours, permuted):
                dispatch(steps, permuted, **{"pad_multiple": 4} if permuted else {})
                call(**given)
                with pytest.raises(ferry.UsageError, match=text if me else "."):
                    call(**given | changes if me else given)
        steps.check_permuted(4)
        steps.check_plain()

    run(case, body)


def test_handles_of_another_buffer(case):
    def body(rank):
        first, second = (Steps(case, rank.index, buffer_of(rank, case)) for _ in range(2))
        rows, *_, handle = dispatch(first, True)
        dispatch(second, True)
        with pytest.raises(ferry.UsageError, match="handle: expected what a dispatch of this buffer returned, got Handle"):
            second.buffer.combine_with_unpermute(hidden=rows, handle=handle)

    ferry.Group.threads(2).run(body)


def test_after_destroy(case):
    def body(steps):
        rows, *_, handle = dispatch(steps, True)
        plain_rows, _, _, plain = dispatch(steps, False)
        steps.buffer.destroy()
        steps.buffer.destroy()
        for call in (lambda: dispatch(steps, True), lambda: dispatch(steps, False),
                     lambda: steps.buffer.dispatch_with_permute(hidden=steps.x, handle=handle),
                     lambda: steps.buffer.combine_with_unpermute(hidden=rows, handle=handle),
                     lambda: steps.buffer.combine(plain_rows, handle=plain)):
            with pytest.raises(ferry.UsageError, match="destroy"):
                call()
        assert len(handle) == 11 and handle[-1].tolist() == [0]

    run(case, body)


@pytest.mark.parametrize("changes, text", [
    ({"hidden_dim": "wide"}, "hidden_dim: expected an integer from 1 .* got 'wide'"),
    ({"num_local_experts": 0}, "num_local_experts: expected an integer from 1 to 2147483647, got 0"),
    ({"num_sms_combine_api": 1.5}, "num_sms_combine_api: expected an integer from 0 .* got 1.5"),
    ({"nonsense": 1}, "HybridEPBuffer: there is no argument 'nonsense'"),
])
def test_constructor(changes, text):
    def body(rank):
        given = {"hidden_dim": HIDDEN, "max_num_of_tokens_per_rank": 4, "num_local_experts": 2}
        with pytest.raises(ferry.UsageError, match=text):
            deep_ep.HybridEPBuffer(rank, **given | changes if rank.index else given)

    ferry.Group.threads(2).run(body)


def test_ranks_disagree(case):
    def body(steps):
        for settings, text in [
            ({"pad_multiple": 8 if steps.me else 4}, "dispatch: pad_multiple is 4 on rank 0 and 8 on rank 1"),
            ({"probs": steps.probs if steps.me else None}, "probs|weights"),
        ]:
            with pytest.raises(ferry.UsageError, match=text):
                dispatch(steps, True, **settings)
        rows, *_, handle = dispatch(steps, True)
        with pytest.raises(ferry.UsageError):  # a dispatch that agrees, and a combine
            if steps.me:
                steps.buffer.combine_with_unpermute(hidden=rows, handle=handle)
            else:
                dispatch(steps, True, pad_multiple=16)
        with pytest.raises(ferry.UsageError):
            dispatch(steps, bool(steps.me))
        steps.check_permuted(4)

    run(case, body)


@pytest.mark.parametrize("ours, theirs", [(1, 2), (2, 1), (0, 3), (1, 3), (2, 3), (3, 0), (3, 1), (3, 2), (0, 4), (1, 4), (2, 4), (3, 4)])
def test_ranks_in_different_calls(case, ours, theirs):
    """Every rank gets an error at once, also where one of them must gather or its argument is wrong."""

    def body(steps):
        buffer, me = steps.buffer, steps.me
        rows, probs, *_, handle = dispatch(steps, True)
        plain_rows, plain_probs, _, plain = dispatch(steps, False)
        calls = [
            lambda: buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle),
            lambda: buffer.combine(plain_rows, handle=plain),
            lambda: buffer.dispatch(steps.x, handle=plain),
            lambda: dispatch(steps, True, pad_multiple=64),  # a new shape
            lambda: buffer.combine_with_unpermute(hidden=rows, handle=None),
        ]
        started = time.monotonic()
        with pytest.raises(ferry.UsageError):
            calls[theirs if me else ours]()
        assert time.monotonic() - started < 20
        steps.check_permuted(4)
        steps.check_plain()

    run(case, body)


def test_growth_of_one_rank_in_a_call_that_does_not_block(rng):
    """The ranks with room for their tokens learn from the refusal that all agree on more, and the call goes on."""
    few, many = random_case(rng, 2, most=4), random_case(rng, 2, most=4)
    many = type(many)(many.nodes, 4, [np.repeat(many.maps[0], 100, 0)[:50], many.maps[1]],
                      [np.repeat(many.probs[0], 100, 0)[:50], many.probs[1]], [np.repeat(many.hidden[0], 100, 0)[:50], many.hidden[1]])

    def body(rank):
        buffer = buffer_of(rank, few, 4)
        Steps(few, rank.index, buffer).check_permuted(None, 8, non_blocking=True)
        Steps(many, rank.index, buffer).check_permuted(None, 16, non_blocking=True)

    ferry.Group.threads(2).run(body)


def test_a_token_of_too_many_experts():
    def body(rank):
        buffer = deep_ep.HybridEPBuffer(rank, HIDDEN, 4, 40)
        with pytest.raises(ferry.UnsupportedError, match="routing_map: a token goes to more than 32 experts"):
            buffer.dispatch(np.ones((2, HIDDEN), bf16), routing_map=np.ones((2, 40), bool))

    ferry.Group.threads(1).run(body)


def test_interrupted_while_arguments_are_read(case):
    def body(steps):
        with pytest.raises((KeyboardInterrupt, ferry.UsageError)):
            dispatch(steps, True, routing_map=Interrupted() if steps.me else steps.map)

    run(case, body)


def test_a_peer_that_does_not_come(case, monkeypatch):
    monkeypatch.setattr(_exchanges, "DEADLINE", 0.3)
    gone = threading.Event()

    def body(rank):
        steps = Steps(case, rank.index, buffer_of(rank, case))
        steps.check_permuted(4)
        if rank.index:
            gone.wait(30)
            return
        with pytest.raises((ferry.TimeoutError, ferry.PeerLostError), match="rank 1"):
            dispatch(steps, True, pad_multiple=4)
        gone.set()

    ferry.Group.threads(2).run(body)
