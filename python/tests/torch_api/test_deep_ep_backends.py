"""ferry.deep_ep between simulated hosts on GPUs, over nvshmem and over collective: every call, none that waits, and graphs.

A process for each GPU, on two hosts; under MPS two for each. Needs FERRY_NVSHMEM_MODULE and NVSHMEM_REMOTE_TRANSPORT=none.
"""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
import hybrid_steps
from deep_ep_steps import HIDDEN, full_step, step_of
from internode_steps import check_all_calls, check_low_latency
from oracle import bf16, messages_to
from torch_processes import GPUS, bits, run, tensor, to_numpy

UNDER_MPS = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
RANKS = 2 * GPUS if UNDER_MPS else GPUS
NODES = [2 * rank // max(1, RANKS) for rank in range(RANKS)]
PROCESS_GROUP = "gloo" if UNDER_MPS else "nccl"  # NCCL takes one rank a GPU
BUSY_CYCLES = 3_000_000_000  # more than a second
EXPERTS, TOP_K, MOST = 16, 3, 5  # of full_step()

pytestmark = [pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
              pytest.mark.skipif("FERRY_NVSHMEM_MODULE" not in os.environ, reason="needs FERRY_NVSHMEM_MODULE")]
ranks = pytest.mark.parametrize("ranks", [RANKS])
backends = pytest.mark.parametrize("backend", ["nvshmem", "collective"])


def on_hosts(body, rng, ranks):
    run(body, rng, ranks, PROCESS_GROUP)


def buffer_of(rank, backend=None, **settings):
    os.environ["FERRY_HOST_ID"] = f"host {NODES[rank]}"
    os.environ["FERRY_DEEP_EP_BACKEND"] = backend or ""
    return deep_ep.Buffer(torch.distributed.group.WORLD, int(2e9), int(2e9), low_latency_mode=True, explicitly_destroy=True, **settings)


def layout_of(buffer, ids, experts):
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    return dict(zip(names, buffer.get_dispatch_layout(ids, experts)))


def check_choice(rank, device, rng):
    step = step_of(rng, RANKS)
    x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
    for asked, expected in (("", "nvshmem"), ("automatic", "nvshmem"), ("nvshmem", "nvshmem"), ("collective", "collective")):
        buffer = buffer_of(rank, asked)
        config = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout_of(buffer, ids, step.experts))[4].exchange.config
        assert (config.backend, config.memory, config.hops) == (expected, "device", "two")
        buffer.destroy()


@ranks
def test_the_backend_is_nvshmem_unless_the_environment_asks_for_another(rng, ranks):
    on_hosts(check_choice, rng, ranks)


def check_calls(rank, device, rng, backend):
    step = step_of(rng, RANKS, most=60)
    buffer = buffer_of(rank, backend)
    on_device = lambda array: tensor(array, device)
    elements = check_all_calls(buffer, step, rank, on_device, to_numpy)
    check_low_latency(buffer, step, rank, on_device, to_numpy)
    of_threads = ferry.Group.threads(RANKS, 2).run(lambda member: check_all_calls(
        deep_ep.Buffer(member, int(2e9), int(2e9)), step, member.index))[rank]
    for element, expected in zip(elements, of_threads):
        assert element.dtype == expected.dtype and element.tolist() == expected.tolist()
    x, ids, weights = (on_device(array[rank]) for array in (step.tokens, step.ids, step.weights))
    layout = layout_of(buffer, ids, step.experts)
    rows, *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    before = handle.exchange.wire_counts()
    buffer.dispatch(x, handle=handle)
    buffer.combine(rows, handle)
    torch.cuda.synchronize()
    after = handle.exchange.wire_counts()
    sent = sum(count for node, count in enumerate(layout["num_tokens_per_rdma_rank"].tolist()) if node != NODES[rank])
    assert after.dispatch_messages_between_nodes - before.dispatch_messages_between_nodes == sent
    returned = after.combine_messages_between_nodes - before.combine_messages_between_nodes
    both = torch.tensor([sent, returned], device=device if PROCESS_GROUP == "nccl" else "cpu")
    torch.distributed.all_reduce(both)
    assert both[0] == both[1]  # a combine returns one sum for each of them
    buffer.destroy()


def check_calls_over_nvshmem(rank, device, rng):
    check_calls(rank, device, rng, "nvshmem")


def check_calls_over_collective(rank, device, rng):
    check_calls(rank, device, rng, "collective")


@ranks
@backends
def test_all_calls_and_each_token_crosses_once(rng, ranks, backend):
    on_hosts({"nvshmem": check_calls_over_nvshmem, "collective": check_calls_over_collective}[backend], rng, ranks)


class Calls:
    """The calls for which DeepEP's host does not wait, on tensors that stay at their addresses."""

    def __init__(self, rank, device, rng):
        self.step = full_step(rng, RANKS)
        self.buffer = buffer_of(rank)
        self.x, self.ids, self.weights = (tensor(array[rank], device) for array in (self.step.tokens, self.step.ids, self.step.weights))
        self.bias = torch.ones_like(self.x)
        self.handle = self.buffer.dispatch(self.x, topk_idx=self.ids, topk_weights=self.weights,
                                           **layout_of(self.buffer, self.ids, EXPERTS))[4]

    def by_handle(self):
        rows = self.buffer.dispatch(self.x, handle=self.handle)[0]
        return rows, self.buffer.combine(rows, self.handle, bias=self.bias)[0]

    def dispatch(self, layout, **settings):
        return self.buffer.dispatch(
            self.x, topk_idx=self.ids, topk_weights=self.weights, num_worst_tokens=RANKS * MOST, **(layout | settings))

    def with_new_routes(self):
        buffer, ids = self.buffer, self.ids
        rows, idx, weights, counts, handle, _ = self.dispatch(layout_of(buffer, ids, EXPERTS))
        assert counts == [] and len(rows) == RANKS * MOST
        again = buffer.dispatch(self.x, handle=handle)[0]
        y, of_slots, _ = buffer.combine(again, handle, topk_weights=weights, bias=self.bias)
        recv, counts, of_decode, _, _ = buffer.low_latency_dispatch(self.x, ids, MOST, EXPERTS, use_fp8=False)
        decoded = buffer.low_latency_combine(recv, ids, self.weights, of_decode)[0]
        return rows, idx, handle.node_routes, y, of_slots, counts, decoded

    def results(self, made):
        """The bits of what with_new_routes() has returned, without rows that were not received."""
        rows, idx, *others = made
        received = (idx >= 0).any(1)
        return [bits(rows[received]), bits(idx), *map(bits, others)]


def check_no_call_waits(rank, device, rng):
    calls = Calls(rank, device, rng)
    for _ in range(2):  # makes what the first calls of a shape make
        calls.by_handle(), calls.with_new_routes()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    for call in (calls.by_handle, calls.with_new_routes):
        torch.cuda._sleep(BUSY_CYCLES)
        free = torch.cuda.Event()
        free.record()
        call()
        assert not free.query(), "the host has waited for the GPU"
        torch.cuda.synchronize()
    calls.buffer.destroy()


@ranks
def test_no_call_waits_where_those_of_deep_ep_do_not(rng, ranks):
    on_hosts(check_no_call_waits, rng, ranks)


def check_memory(rank, device, rng):
    """The routes are freed, and their memory filled, before the dispatch has begun."""
    calls = Calls(rank, device, rng)
    expected = [calls.with_new_routes()[2] for _ in range(2)][0].clone()
    layout = layout_of(calls.buffer, calls.ids, EXPERTS)
    shape = layout["is_token_in_rank"].shape
    torch.cuda.synchronize()
    with torch.cuda.stream(calls.buffer.get_comm_stream()):
        torch.cuda._sleep(BUSY_CYCLES)
    *_, handle, event = calls.dispatch(layout, async_finish=True)
    routes = handle.node_routes
    del layout, handle
    noise = [torch.ones(shape, dtype=torch.bool, device=device) for _ in range(8)]
    event.current_stream_wait()
    assert bits(routes) == bits(expected) and all(bool(array.all()) for array in noise)
    calls.buffer.destroy()


@ranks
def test_routes_of_an_asynchronous_call_stay_in_memory(rng, ranks):
    on_hosts(check_memory, rng, ranks)


def check_graphs(rank, device, rng):
    calls = Calls(rank, device, rng)
    for _ in range(2):
        calls.by_handle(), calls.with_new_routes()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        cached, made = calls.by_handle(), calls.with_new_routes()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        found = [*map(bits, cached), *calls.results(made)]
        assert found == [*map(bits, calls.by_handle()), *calls.results(calls.with_new_routes())]
        fan_out = calls.buffer.get_dispatch_layout(calls.ids, EXPERTS)[3].sum(1, keepdim=True)
        assert torch.allclose(made[3].float(), calls.x.float() * fan_out + 1, rtol=0.03, atol=0.06)
        assert bits(made[4]) == bits(torch.where(calls.ids >= 0, calls.weights, 0))
        # Other values, and other routes.
        calls.x.copy_(torch.randn_like(calls.x))
        calls.ids.copy_(torch.rand(MOST, EXPERTS, device=device).topk(TOP_K).indices)
    calls.buffer.destroy()


@ranks
def test_graphs_capture_and_replay(rng, ranks):
    on_hosts(check_graphs, rng, ranks)


def check_other_interfaces(rank, device, rng):
    buffer_of(rank).destroy()  # sets the environment
    group = torch.distributed.group.WORLD
    case = hybrid_steps.random_case(rng, RANKS, NODES)
    steps = hybrid_steps.Steps(case, rank, hybrid_steps.buffer_of(group, case), lambda array: tensor(array, device), to_numpy)
    steps.check_permuted(8)
    steps.check_plain()
    steps.buffer.destroy()

    step = step_of(rng, RANKS)
    x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=9, hidden=HIDDEN, explicitly_destroy=True)
    rows, _, of_rows, handle, _ = elastic.dispatch(x, ids, weights, num_experts=step.experts)
    expected = messages_to(step, rank)
    sent = np.array([step.tokens[s][t] for s, t in expected], bf16).reshape(-1, HIDDEN)
    assert bits(rows[: len(expected)]) == sent.tobytes()
    y, of_slots, _ = elastic.combine(rows, handle, of_rows)
    fan_out = (elastic_routes(step, rank) > 0).sum(1, keepdims=True)
    assert np.allclose(to_numpy(y).astype(np.float32), step.tokens[rank].astype(np.float32) * fan_out, rtol=0.03, atol=0.06)
    assert bits(of_slots) == np.where(step.ids[rank] >= 0, step.weights[rank], np.float32(0)).tobytes()
    if PROCESS_GROUP == "nccl":  # sessions gather tensors of GPUs in such a process group
        elastic.agrs_set_config(1 << 16, 2)
        with elastic.agrs_new_session():
            gathered, wait = elastic.all_gather(torch.full((32,), rank, dtype=torch.int32, device=device))
            wait()
            assert gathered.tolist() == [[peer] * 32 for peer in range(RANKS)]
    elastic.destroy()


def elastic_routes(step, rank):
    """[T, R]: the experts of each rank that each token goes to."""
    local = step.experts // RANKS
    return np.array([[sum(i >= 0 and i // local == peer for i in of_token) for peer in range(RANKS)]
                     for of_token in step.ids[rank].tolist()]).reshape(-1, RANKS)


@ranks
def test_elastic_and_hybrid_buffers(rng, ranks):
    on_hosts(check_other_interfaces, rng, ranks)
