"""Errors of deep_ep between nodes: typed, on every rank at once, and the next call works."""

import time

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, layout_and_dispatch, low_latency
from ferry.deep_ep import _exchanges
from node_ranks import EVEN, TRANSPORTS, name_of
from oracle import bf16, messages_to, random_ids, same_bits, Step

ENOUGH = int(1e9)
cases = pytest.mark.parametrize("case", EVEN[:2], ids=name_of)
WRONG = 1  # the rank whose call is wrong


def full_step(rng, case, tokens=5):
    """A step with as many tokens on every rank, so that a wrong number of rows is noticed."""
    ranks = len(case[1])
    return Step(16, 3, [rng.standard_normal((tokens, HIDDEN)).astype(bf16) for _ in range(ranks)],
                [random_ids(rng, tokens, 16, 3, masked=0) for _ in range(ranks)],
                [rng.random((tokens, 3), np.float32) for _ in range(ranks)])


def on_nodes(case, body, num_rdma_bytes=lambda rank: ENOUGH, **settings):
    transport, nodes = case
    return TRANSPORTS[transport](nodes, lambda rank: body(
        rank.index, deep_ep.Buffer(rank, int(2e9), num_rdma_bytes(rank.index), explicitly_destroy=True, **settings)))


@cases
@pytest.mark.parametrize("low_latency_mode", [False, True])
@pytest.mark.parametrize("wrong", [{0, 1, 2, 3}, {1}])
def test_no_memory_between_nodes(case, low_latency_mode, wrong):
    transport, nodes = case

    def body(rank):
        with pytest.raises(ferry.UsageError, match=f"rank {min(wrong)} has num_rdma_bytes = 0, must be above 0 in a group of 2 nodes"):
            deep_ep.Buffer(rank, int(2e9), 0 if rank.index in wrong else ENOUGH, low_latency_mode)
        return True

    assert TRANSPORTS[transport](nodes, body) == [True] * 4


@cases
@pytest.mark.parametrize("call", ["dispatch", "dispatch by a handle", "combine", "worst"])
def test_too_little_memory_between_nodes(rng, case, call):
    step = full_step(rng, case)
    small, large = deep_ep.Config(4, 8, 256, 8, 16), deep_ep.Config(4, 8, 256, 8, 4096)
    room = small.get_rdma_buffer_size_hint(HIDDEN * 2, 4)
    assert 0 < room < large.get_rdma_buffer_size_hint(HIDDEN * 2, 4)

    def body(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me, config=small)

        def run(config):
            if call == "dispatch by a handle":
                return buffer.dispatch(step.tokens[me], handle, config=config)
            if call == "combine":
                return buffer.combine(rows, handle, config=config)
            return layout_and_dispatch(buffer, step, me, config=config, **({"num_worst_tokens": 20} if call == "worst" else {}))

        # The config of every rank asks for more, then that of one rank.
        text = f"num_rdma_bytes = {room}, but a call between nodes with rows of {2 * HIDDEN} bytes takes"
        with pytest.raises(ferry.UsageError, match=text):
            run(large)
        with pytest.raises(ferry.UsageError, match=text if me == WRONG else f"rank {WRONG} refused.*{text}"):
            run(large if me == WRONG else small)
        assert len(run(small)[0]) == {"combine": 5, "worst": 20}.get(call, len(rows))
        return True

    assert on_nodes(case, body, lambda rank: room) == [True] * 4


@cases
@pytest.mark.parametrize("hook", [False, True])
def test_too_little_memory_of_low_latency_mode(rng, case, hook):
    step = full_step(rng, case)
    room = deep_ep.Buffer.get_low_latency_rdma_size_hint(9, HIDDEN, 4, 16)

    def body(me, buffer):
        with pytest.raises(ferry.UsageError, match=f"rank 0 has num_rdma_bytes = {room}, but such calls between nodes take"):
            low_latency(buffer, step, me, most=99, use_fp8=False, return_recv_hook=hook)
        for _ in range(2):
            result = low_latency(buffer, step, me, use_fp8=False, return_recv_hook=hook)
            if hook:
                result[-1]()
        return int(result[1].sum())

    assert sum(on_nodes(case, body, lambda rank: room, low_latency_mode=True)) == 4 * 5 * 3


INTERFACES = {
    "Buffer": lambda rank: deep_ep.Buffer(rank, 0, ENOUGH),
    "ElasticBuffer": lambda rank: deep_ep.ElasticBuffer(rank, num_max_tokens_per_rank=5),
    "HybridEPBuffer": lambda rank: deep_ep.HybridEPBuffer(rank, HIDDEN, 5, 2),
}


@pytest.mark.parametrize("interface", INTERFACES)
def test_backends_that_are_unknown_or_differ(interface, monkeypatch):
    """Each rank has an environment of its own: ranks are processes."""
    def body(rank):
        for value, text in (("nccl", "FERRY_DEEP_EP_BACKEND: expected automatic, nvshmem or collective, got 'nccl'"),
                            ("collective", "FERRY_DEEP_EP_BACKEND is automatic on rank 0 and collective on rank 1: set the same")):
            monkeypatch.setenv("FERRY_DEEP_EP_BACKEND", value if rank.index else "")
            with pytest.raises(ferry.UsageError, match=text):
                INTERFACES[interface](rank)
        monkeypatch.setenv("FERRY_DEEP_EP_BACKEND", "nvshmem")
        INTERFACES[interface](rank)
        return True

    assert ferry.Group.processes(ferry.Topology([0, 1])).run(body) == [True, True]


@pytest.mark.parametrize("asked", ["", "automatic", "nvshmem", "collective"])
def test_backends_between_gpus_of_several_hosts(asked, monkeypatch):
    monkeypatch.setenv("FERRY_DEEP_EP_BACKEND", asked)
    expected = {"backend": asked or "automatic", "memory": "device", "hops": "two"}
    if asked == "collective":
        expected["engine"] = "automatic"

    def transport(me, buffer):
        return buffer.exchanges._transport(on_device=True)

    assert on_nodes(("functions", [0, 1]), transport) == [expected] * 2
    assert on_nodes(("shared memory", [0, 1]), transport) == [{"backend": "cuda", "hops": "two"}] * 2


@pytest.mark.parametrize("has_engine", [False, True])
def test_the_groups_engine_serves_gpus_without_nvshmem_and_nccl(has_engine, monkeypatch):
    monkeypatch.delenv("FERRY_DEEP_EP_BACKEND", raising=False)

    tried = [[], []]

    def exchange(rank, **settings):
        of_rank = tried[rank.index]
        of_rank.append((settings["backend"], settings.get("engine"), settings["memory"], settings["hops"]))
        if not has_engine or len(of_rank) == 1:
            raise ferry.UnsupportedError(f"attempt {len(of_rank)}")
        return "made"

    def body(me, buffer):
        if has_engine:
            return buffer.exchanges._make_on(True, {}) == "made"
        with pytest.raises(ferry.UnsupportedError, match="attempt 1"):
            buffer.exchanges._make_on(True, {})
        return True

    monkeypatch.setattr(ferry, "Exchange", exchange)
    assert on_nodes(("functions", [0, 1]), body) == [True] * 2
    assert tried == [[("automatic", None, "device", "two"), ("collective", "automatic", "device", "two")]] * 2


def bad_dispatches():
    """name -> a call of one rank that the other ranks make as it should be, and what its error says."""
    zeros = np.zeros
    return {
        "x": (lambda b, s, me: layout_and_dispatch(b, s, me, x=s.tokens[me].astype(np.float32)), "expected bfloat16"),
        "no counts of nodes": (lambda b, s, me: layout_and_dispatch(b, s, me, num_tokens_per_rdma_rank=None), "num_tokens_per_rdma_rank is needed"),
        "counts of ranks": (lambda b, s, me: layout_and_dispatch(b, s, me, num_tokens_per_rdma_rank=zeros(4, np.int32)), r"num_tokens_per_rdma_rank: expected shape \[2\]"),
        "counts of floats": (lambda b, s, me: layout_and_dispatch(b, s, me, num_tokens_per_rdma_rank=zeros(2, np.float32)), "num_tokens_per_rdma_rank: expected int32 or int64"),
        "counts in a list": (lambda b, s, me: layout_and_dispatch(b, s, me, num_tokens_per_rdma_rank=[1, 2]), "num_tokens_per_rdma_rank"),
        "no routes": (lambda b, s, me: b.internode_dispatch(s.tokens[me]), "are needed"),
        "routes of fewer ranks": (lambda b, s, me: layout_and_dispatch(b, s, me, is_token_in_rank=zeros((5, 2), bool)), "is_token_in_rank: expected shape"),
        "weights": (lambda b, s, me: layout_and_dispatch(b, s, me, topk_weights=s.weights[me][:1]), "topk_weights"),
        "weights alone": (lambda b, s, me: layout_and_dispatch(b, s, me, topk_idx=None), "go together"),
        "config": (lambda b, s, me: layout_and_dispatch(b, s, me, config=7), "expected a Config"),
        "odd SMs": (lambda b, s, me: layout_and_dispatch(b, s, me, config=deep_ep.Config(21)), "config.num_sms = 21, must be even"),
        "worst": (lambda b, s, me: layout_and_dispatch(b, s, me, num_worst_tokens=-5), "num_worst_tokens"),
    }


@cases
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", bad_dispatches())
def test_a_bad_dispatch_ends_on_all_ranks(rng, case, name, later):
    step, (mistake, text) = full_step(rng, case), bad_dispatches()[name]

    def body(me, buffer):
        if later:  # otherwise it is the Buffer's first call
            layout_and_dispatch(buffer, step, me)
        with pytest.raises(Exception, match=text if me == WRONG else f"rank {WRONG} refused dispatch") as raised:
            (mistake if me == WRONG else layout_and_dispatch)(buffer, step, me)
        assert me == WRONG or isinstance(raised.value, ferry.UsageError)
        rows = layout_and_dispatch(buffer, step, me)[0]
        assert len(rows) == len(messages_to(step, me))
        return True

    assert on_nodes(case, body) == [True] * 4


BAD_BY_HANDLE = {
    "combine: x": "bfloat16", "combine: fewer rows": r"x: expected the \d+ rows that the dispatch",
    "combine: more rows": r"x: expected the \d+ rows that the dispatch of the handle returned, got \d+", "combine: more weights": "topk_weights: expected the",
    "combine: fewer weights": "topk_weights: expected the", "combine: event": "ValueError|ambiguous", "dispatch: columns": r"x: expected shape \[5, 256\].*\[5, 128\]",
    "combine: bias": "bias", "combine: three biases": "at most two",
    "combine: weights": "topk_weights", "combine: config": "expected a Config", "combine: no handle": "a handle of dispatch",
    "combine: low-latency handle": "a handle of dispatch", "dispatch: x": "bfloat16", "dispatch: ids": "handle excludes",
    "dispatch: other tokens": "x: expected shape", "dispatch: a tuple": "a handle of dispatch", "dispatch: low-latency handle": "a handle of dispatch",
    "dispatch: another call's handle": "x: expected shape", "combine: another call's handle": r"row|bias\[0\]",
    "dispatch: a handle of as many tokens": "call that made the plan", "combine: a handle of as many tokens": "call that made the plan",
}


@cases
@pytest.mark.parametrize("name", BAD_BY_HANDLE)
def test_bad_calls_by_a_handle_end_on_all_ranks(rng, case, name):
    step, other, alike = full_step(rng, case), full_step(rng, case, tokens=7), full_step(rng, case)

    def body(me, buffer):
        theirs, like_mine = layout_and_dispatch(buffer, other, me)[4], layout_and_dispatch(buffer, alike, me)[4]
        of_low_latency = low_latency(buffer, step, me, use_fp8=False)[2]
        rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me)
        wrong = {
            "combine: x": {"x": rows.astype(np.float32)},
            "combine: fewer rows": {"x": rows[:-1]},
            "combine: more rows": {"x": np.concatenate([rows, rows[:1]])},
            "combine: more weights": {"topk_weights": np.concatenate([weights, weights[:1]])},
            "combine: fewer weights": {"topk_weights": weights[:-1]},
            "combine: event": {"async_finish": np.ones(2)},
            "dispatch: columns": {"x": np.ascontiguousarray(step.tokens[me][:, : HIDDEN // 2])},
            "combine: bias": {"bias": np.ones((1, HIDDEN), bf16)},
            "combine: three biases": {"bias": (step.tokens[me],) * 3},
            "combine: weights": {"topk_weights": weights.astype(np.float64)},
            "combine: config": {"config": 7},
            "combine: no handle": {"handle": None},
            "combine: low-latency handle": {"handle": of_low_latency},
            "combine: another call's handle": {"handle": theirs},
            "combine: a handle of as many tokens": {"x": np.resize(rows, (like_mine.rows, HIDDEN)), "topk_weights": None, "handle": like_mine},
            "dispatch: x": {"x": step.tokens[me].astype(np.float32)},
            "dispatch: ids": {"topk_idx": step.ids[me]},
            "dispatch: other tokens": {"x": step.tokens[me][:-1]},
            "dispatch: a tuple": {"handle": tuple(handle)},
            "dispatch: low-latency handle": {"handle": of_low_latency},
            "dispatch: another call's handle": {"handle": theirs},
            "dispatch: a handle of as many tokens": {"handle": like_mine},
        }[name]
        call, right = buffer.internode_combine, {"x": rows, "handle": handle, "topk_weights": weights, "bias": step.tokens[me]}
        if name.startswith("dispatch"):
            call, right = buffer.internode_dispatch, {"x": step.tokens[me], "handle": handle}
        before = call(**right)[0]
        of_peers = "call that made the plan" if "as many" in name else f"rank {WRONG} refused"
        kind = ValueError if "event" in name and me == WRONG else ferry.UsageError
        with pytest.raises(kind, match=BAD_BY_HANDLE[name] if me == WRONG else of_peers):
            call(**(right | wrong if me == WRONG else right))
        assert same_bits(call(**right)[0], before)
        return True

    assert on_nodes(case, body) == [True] * 4


@cases
def test_an_id_out_of_range(rng, case):
    step = full_step(rng, case)
    step.ids[WRONG][2, 0] = 16
    of_valid = Step(16, 3, step.tokens, [np.where(ids == 16, -1, ids) for ids in step.ids], step.weights)

    def body(me, buffer):
        for worst in (0, 20):
            if me == WRONG:
                with pytest.raises(ferry.BadIdError):
                    layout_and_dispatch(buffer, step, me, num_worst_tokens=worst)
            else:
                rows, *_, handle, _ = layout_and_dispatch(buffer, step, me, num_worst_tokens=worst)
                expected = messages_to(of_valid, me)
                assert len(rows) == (worst or len(expected))
                assert all(same_bits(rows[row], step.tokens[s][t]) for row, (s, t) in enumerate(expected))
                assert handle[7].shape == (len(expected), 8) and len(handle[9]) == handle[4][-1]
        return len(layout_and_dispatch(buffer, of_valid, me)[0])

    assert on_nodes(case, body) == [len(messages_to(of_valid, me)) for me in range(4)]


@cases
@pytest.mark.parametrize("hook", [False, True])
def test_bad_low_latency_calls_end_on_all_ranks(rng, case, hook):
    step = full_step(rng, case)

    def finished(result):
        if hook:
            result[-1]()
        return result

    def body(me, buffer):
        split = {"use_fp8": False, "return_recv_hook": hook}
        for wrong in ({"use_ue8m0": True}, {"cumulative_local_expert_recv_stats": np.zeros(3, np.int32)}):
            with pytest.raises(ferry.UsageError, match=None if me == WRONG else f"rank {WRONG} refused"):
                finished(low_latency(buffer, step, me, **(split | (wrong if me == WRONG else {}))))
        recv, _, handle, *_ = finished(low_latency(buffer, step, me, **split))
        of_normal = layout_and_dispatch(buffer, step, me)[4]
        right = {"x": recv, "topk_idx": step.ids[me], "topk_weights": step.weights[me], "handle": handle, "return_recv_hook": hook}
        for wrong in ({"x": recv[0]}, {"topk_weights": None}, {"zero_copy": True}, {"out": np.zeros((1, HIDDEN), bf16)},
                      {"handle": None}, {"handle": of_normal}):
            with pytest.raises(ferry.UsageError, match=None if me == WRONG else f"rank {WRONG} refused"):
                finished(buffer.low_latency_combine(**(right | (wrong if me == WRONG else {}))))
        y = finished(buffer.low_latency_combine(**right))[0].astype(np.float32)
        assert np.allclose(y, step.weights[me].sum(1, keepdims=True) * step.tokens[me].astype(np.float32), rtol=3e-2, atol=3e-2)
        return True

    assert on_nodes(case, body, low_latency_mode=True) == [True] * 4


@cases
def test_use_after_destroy(rng, case):
    step = full_step(rng, case)

    def body(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        buffer.destroy()
        for call in (lambda: buffer.internode_dispatch(step.tokens[me], handle), lambda: buffer.internode_combine(rows, handle),
                     lambda: buffer.get_dispatch_layout(step.ids[me], 16), lambda: low_latency(buffer, step, me)):
            with pytest.raises(ferry.UsageError, match="destroy"):
                call()
        return True

    assert on_nodes(case, body) == [True] * 4


@cases
@pytest.mark.parametrize("call", ["dispatch", "dispatch by a handle", "combine"])
def test_a_rank_that_takes_no_part(rng, case, call, monkeypatch):
    monkeypatch.setattr(_exchanges, "DEADLINE", 1.0)
    step = full_step(rng, case)
    found = []

    def body(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        if me == WRONG:  # exists, but does not take part
            while len(found) < 3:
                time.sleep(0.01)
            return True
        try:
            begin = time.monotonic()
            {"dispatch": lambda: layout_and_dispatch(buffer, step, me), "combine": lambda: buffer.combine(rows, handle),
             "dispatch by a handle": lambda: buffer.dispatch(step.tokens[me], handle)}[call]()
        except (ferry.TimeoutError, ferry.PeerLostError) as error:
            assert time.monotonic() - begin < 40
            found.append(error)
        return True

    assert on_nodes(case, body) == [True] * 4
    assert any(isinstance(error, ferry.TimeoutError) for error in found)
