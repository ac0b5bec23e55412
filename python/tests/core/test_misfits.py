"""Calls of the other systems' shapes whose arguments do not fit the signature: every rank gets an error, and the next call works."""

import copy
import inspect
import pickle

import numpy as np
import pytest

import ferry
import ferry.deep_ep
import ferry.max
import ferry.megatron
import ferry.nvfuser
from oracle import bf16

SETTINGS = {"experts": 4, "top_k": 2, "hidden": 256, "max_tokens": 4}
IDS, W = np.array([[0, 3], [2, 1], [3, 2]]), np.ones((3, 2), np.float32)


def tokens_of(rank):
    return (np.arange(3 * 256).reshape(3, 256) % 61 + 7 * rank.index).astype(bf16)


class DeepEp:
    def __init__(self, rank):
        self.x, self.buffer = tokens_of(rank), ferry.deep_ep.Buffer(rank)
        self.step()

    def calls(self):
        buffer, x = self.buffer, self.x
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS, 4)
        routes = {"topk_idx": IDS, "topk_weights": W, "num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        return {
            "dispatch": (buffer.dispatch, (x,), routes), "worst case": (buffer.dispatch, (x,), routes | {"num_worst_tokens": 8}),
            "by a handle": (buffer.dispatch, (x, self.handle), {}), "combine": (buffer.combine, (self.rows, self.handle), {}),
            "low latency": (buffer.low_latency_dispatch, (x, IDS, 4, 4), {"use_fp8": False}),
            "low latency combine": (buffer.low_latency_combine, (self.recv, IDS, W, self.low_latency), {}),
        }

    def step(self):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(IDS, 4)
        self.rows, *_, self.handle, _ = self.buffer.dispatch(
            self.x, topk_idx=IDS, topk_weights=W, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
        y = self.buffer.combine(self.rows, self.handle)[0]
        assert np.array_equal(y, self.x * np.array([2, 2, 1], bf16)[:, None])  # ranks of each token's experts
        self.recv, _, self.low_latency, *_ = self.buffer.low_latency_dispatch(self.x, IDS, 4, 4, use_fp8=False)
        assert np.array_equal(self.buffer.low_latency_combine(self.recv, IDS, W, self.low_latency)[0], 2 * self.x)


class Max:
    def __init__(self, rank):
        self.x, self.exchange = tokens_of(rank), ferry.max.Exchange(rank, **SETTINGS)
        self.step()

    def calls(self):
        exchange = self.exchange
        combined = (self.received.output_tokens.copy(), *self.received[5:6], self.received.row_offsets, self.received.counts)
        return {"dispatch": (exchange.ep_fused_dispatch, (self.x, IDS), {}), "combine": (exchange.ep_fused_combine, combined, {}),
                "dispatch_async": (exchange.ep_dispatch_async, (self.x, IDS), {}), "combine_async": (exchange.ep_combine_async, combined, {})}

    def step(self):
        self.received = received = self.exchange.ep_fused_dispatch(self.x, IDS)
        y = self.exchange.ep_fused_combine(received.output_tokens.copy(), received.src_info, received.row_offsets, received.counts)
        assert np.array_equal(y, 2 * self.x)


class NvFuser:
    def __init__(self, rank):
        self.x, self.exchange = tokens_of(rank), ferry.nvfuser.Exchange(rank, **SETTINGS)
        self.step()

    def calls(self):
        return {"dispatch": (self.exchange.dispatch, (self.x, IDS), {}), "combine": (self.exchange.combine, (self.received.recv_x, *self.received[2:]), {})}

    def step(self):
        self.received = self.exchange.dispatch(self.x, IDS)
        y = self.exchange.combine(self.received.recv_x, *self.received[2:])
        assert np.array_equal(y, self.x * np.array([2, 2, 1], bf16)[:, None])


class Megatron:
    def __init__(self, rank):
        self.me, self.exchange, self.found = rank.index, ferry.Exchange(rank, **SETTINGS), np.empty(3, np.int32)

    def calls(self):
        return {"metadata": (ferry.megatron.fused_metadata_update, (2, None, self.exchange, self.found), {})}

    def step(self):
        ferry.megatron.fused_metadata_update(3 + self.me, None, self.exchange, self.found)
        assert self.found.tolist() == [7, 3 * self.me, 4]


CALLS = [(DeepEp, name) for name in ("dispatch", "worst case", "by a handle", "combine", "low latency", "low latency combine")] + [
    (Max, name) for name in ("dispatch", "combine", "dispatch_async", "combine_async")] + [
    (NvFuser, "dispatch"), (NvFuser, "combine"), (Megatron, "metadata")]


@pytest.mark.parametrize("wrong", ["unknown", "missing", "more", "twice"])
@pytest.mark.parametrize(("interface", "name"), CALLS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_arguments_that_do_not_fit_end_the_call_on_all_ranks(interface, name, wrong):
    def body(rank):
        used = interface(rank)
        for _ in range(2):
            call, given, named = used.calls()[name]
            first = next(iter(inspect.signature(call).parameters))
            if rank.index:
                given, named = {"unknown": (given, named | {"nonsense": 1}), "missing": (() if name == "by a handle" else given[:-1], named),
                                "more": (given + (None,) * 20, {}), "twice": (given, named | {first: given[0]})}[wrong]
            with pytest.raises(ferry.UsageError) as caught:
                call(*given, **named)
                if "_async" in name:
                    getattr(used.exchange, f"ep_{name.replace('_async', '_wait')}")()  # finds the refusal
            said = str(caught.value)
            assert "nonsense" in said or "rank 1" in said if wrong == "unknown" else rank.index == 0 or f"the arguments are: {first}" in said
            assert rank.index or "rank 1" in said, said
            used.step()

    group = ferry.Group.threads(2)
    group.set_deadline(10)
    group.run(body)


@pytest.mark.parametrize("lane", [1, -1, "0", None])
@pytest.mark.parametrize("name", [name for interface, name in CALLS if interface is Max])
def test_a_lane_that_does_not_exist_ends_the_call_on_all_ranks(name, lane):
    def body(rank):
        used = Max(rank)
        for _ in range(2):
            call, given, named = used.calls()[name]
            with pytest.raises(ferry.UsageError, match=r"lane(: expected an integer| = -?1, must be 0 to 0)") as caught:
                call(*given, **(named | {"lane": lane} if rank.index else named))
                getattr(used.exchange, f"ep_{name.replace('_async', '_wait')}")()  # finds the refusal
            assert rank.index or "rank 1 refused" in str(caught.value)
            used.step()

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("wrong", [{"nonsense": 1}, {"lane": 1}, {"lane": "0"}, {"lane": None}, "more"], ids=str)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_wait_call_with_arguments_that_do_not_fit_ends_the_call(phase, wrong):
    """As a receive phase of ferry.Exchange: the peers have this rank's rows."""
    def body(rank):
        exchange, x = ferry.max.Exchange(rank, deadline=10, **SETTINGS), tokens_of(rank)
        expected = exchange.ep_fused_dispatch(x, IDS)._replace(output_tokens=None)

        def wait(of_phase):
            method = getattr(exchange, f"ep_{of_phase}_wait")
            if rank.index == 0 or of_phase != phase:
                return method()
            with pytest.raises(ferry.UsageError, match="nonsense|lane|too many positional"):
                method(*([1] if wrong == "more" else []), **(wrong if isinstance(wrong, dict) else {}))
            with pytest.raises(ferry.UsageError, match="to wait for"):
                method()
            return exchange.last_dispatch_result() if phase == "dispatch" else None

        for _ in range(2):
            exchange.ep_dispatch_async(x, IDS)
            received = wait("dispatch")
            assert np.array_equal(received.src_info, expected.src_info)
            exchange.ep_combine_async(received.output_tokens.copy(), received.src_info, received.row_offsets, received.counts)
            y = wait("combine")
            assert y is None or np.array_equal(y, 2 * x)

    ferry.Group.threads(2).run(body)


def test_copies_share_the_exchange():
    """Copies of what holds one, such as a module: a copy with a state of its own would lose count of the calls."""
    group = ferry.Group.threads(2)

    def body(rank):
        deep_ep, max_, nvfuser = DeepEp(rank), Max(rank), NvFuser(rank)
        for made in (deep_ep.buffer, max_.exchange, nvfuser.exchange, rank, group, ferry.Exchange(rank, **SETTINGS)):
            assert copy.deepcopy({"made": made})["made"] is made and copy.copy(made) is made
            with pytest.raises(TypeError, match="cannot pickle .*belongs to its process"):
                pickle.dumps(made)
        topology = ferry.Topology([3, 3, 5])
        for same in (copy.deepcopy(topology), copy.copy(topology), pickle.loads(pickle.dumps(topology))):
            assert repr(same) == repr(topology) and same.simulated == topology.simulated
            assert [same.node_of(r) for r in range(same.ranks)] == [0, 0, 1] == [topology.node_of(r) for r in range(3)]

    group.run(body)


CONSTRUCTORS = {
    "Exchange": (ferry.Exchange, SETTINGS), "max.Exchange": (ferry.max.Exchange, SETTINGS), "nvfuser.Exchange": (ferry.nvfuser.Exchange, SETTINGS),
    "Buffer": (ferry.deep_ep.Buffer, {"num_rdma_bytes": 1}),
}
WRONG_SETTINGS = {"unknown": {"nonsense": 1}, "missing": None, "more": (None,) * 20, "of another type": {"hidden": "7"}, "num_rdma_bytes": {"num_rdma_bytes": "a"},
                  "enable_shrink": {"enable_shrink": True}, "without NVLink": {"allow_nvlink_for_low_latency_mode": False}}


@pytest.mark.parametrize("wrong", WRONG_SETTINGS)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_whose_arguments_do_not_fit_ends_on_all_ranks(name, wrong):
    make, settings = CONSTRUCTORS[name]
    if name == "Buffer" and wrong in ("missing", "of another type"):
        pytest.skip("without a group there are no peers; Buffer has no such argument")

    def body(rank):
        change, more, used = WRONG_SETTINGS[wrong] if rank.index else {}, (), dict(settings)
        if change is None:
            del used["hidden"]
        elif isinstance(change, tuple):
            more, used = change, {}
        else:
            used |= change
        with pytest.raises(ferry.Error, match=None if rank.index else "rank 1 refused"):
            make(rank, *more, **used)
        make(rank, **settings)

    group = ferry.Group.threads(2)
    group.set_deadline(10)
    group.run(body)
