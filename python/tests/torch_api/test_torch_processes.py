"""Group.torch, ferry.deep_ep with tensors, and GPU features, with one process for each rank."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
import ferry.torch
from oracle import bf16, messages_to, partial_sums, random_step, routes_to
from torch_processes import BACKEND, GPUS, RANKS, bits, run, tensor

HIDDEN, MOST, EXPERTS, TOP_K = 512, 40, 8 * RANKS, 4
on_gpus = pytest.mark.skipif(not GPUS, reason="no GPU here")


def step_of(rng, dtype=bf16):
    return random_step(rng, RANKS, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, most=MOST, dtype=dtype, ids=np.int64)


def inputs(step, rank, device):
    return [tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights)]


def exchange_of(device, **settings):
    given = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST,
             "backend": "cuda" if device.type == "cuda" else "cpu"}
    return ferry.Exchange(ferry.Group.torch(), **(given | settings))


def expected_result(step, rank):
    return partial_sums(step, rank, lambda r, t, k: step.tokens[r][t].astype(np.float32)).astype(bf16).tobytes()


def check_exchange(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    group = ferry.Group.torch()
    exchange = ferry.Exchange(group, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST)
    assert exchange.config.backend == ("cuda" if BACKEND == "nccl" else "cpu")
    exchange = exchange_of(device)
    rows = exchange.dispatch(x, ids, weights)
    expected = routes_to(step, rank)
    total = rows.wait_total()
    assert total == len(expected) and rows.data.device == device
    y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
    exchange.synchronize()
    assert rows.source[:total].cpu().tolist() == [list(route[1:]) for route in expected]
    assert bits(rows.data[:total]) == b"".join(step.tokens[s][t].tobytes() for _, s, t, _ in expected)
    assert bits(y) == expected_result(step, rank)
    copied = rows.plan.copy()
    exchange.dispatch(x, ids)
    again = exchange.dispatch(x, copied, weights)
    assert bits(exchange.combine(again.data, copied, row_weights=again.weight)) == bits(y)
    assert exchange.metadata(rank + 1).tolist()[0] == RANKS * (RANKS + 1) // 2
    load = exchange.load_counts()
    # A dispatch by a plan is not counted.
    assert load.dispatches == 2 and load.experts.sum() == 2 * sum((ids >= 0).sum() for ids in step.ids)
    # A gather is one call of its lane, in how many rounds ever.
    mine = torch.full((500 if rank == 0 else rank, HIDDEN), rank, dtype=torch.bfloat16, device=device)
    all_rows = 500 + sum(range(1, RANKS))
    gathered = exchange.all_gather_v(mine, torch.empty(all_rows, HIDDEN, dtype=torch.bfloat16, device=device))
    assert exchange.dispatch(x, ids).wait_total() == total
    assert gathered[:, 0].float().sum().item() == sum(r * r for r in range(1, RANKS))


def test_exchange_in_a_process_group(rng):
    run(check_exchange, rng)


def check_normal_mode(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    buffer = deep_ep.Buffer(torch.distributed.group.WORLD, int(2e9), 0, explicitly_destroy=True)
    per_rank, none, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    assert none is None and per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool
    given = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
                 topk_idx=ids, topk_weights=weights, config=deep_ep.Config(24, 8, 256))
    recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(x, **given)
    expected = messages_to(step, rank)
    assert recv_x.shape == (len(expected), HIDDEN) and recv_idx.dtype == deep_ep.topk_idx_t
    assert bits(recv_x) == b"".join(step.tokens[s][t].tobytes() for s, t in expected)
    pairs = [sum(route[0] == rank * 8 + e for route in routes_to(step, rank)) for e in range(8)]
    assert counts == pairs
    assert handle[0].tolist() == [[sum(s <= i for s, _ in messages_to(step, j)) for j in range(RANKS)] for i in range(RANKS)]
    assert handle[3].tolist() == [t for _, t in expected] and len(list(handle)) == 6

    y, combined_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights, bias=(x, x))
    fan_out = in_rank.sum(1, keepdim=True) + 2
    assert torch.allclose(y.float(), x.float() * fan_out, rtol=1e-2, atol=1e-2)
    assert bits(combined_weights) == bits(torch.where(ids >= 0, weights, 0))

    # Asynchronous calls with a handle, on the private stream.
    before = buffer.capture()
    cached, *_, event = buffer.dispatch(x, handle=handle, previous_event=before, async_finish=True)
    event.current_stream_wait()
    assert bits(cached) == bits(recv_x)
    z, _, event = buffer.combine(cached, handle, async_finish=True)
    event.current_stream_wait()
    assert bits(z) == bits(buffer.combine(recv_x, handle)[0])

    worst = buffer.dispatch(x, num_worst_tokens=RANKS * MOST, **given)
    assert worst[0].shape[0] == RANKS * MOST and worst[3] == []
    assert bits(worst[0][: len(expected)]) == bits(recv_x) and bool((worst[1][len(expected) :] == -1).all())
    assert bits(buffer.combine(worst[0], worst[4])[0]) == bits(z)

    values = torch.randint(0, 120, (len(x), HIDDEN), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.rand(HIDDEN // 128, len(x), device=device).T  # stored by columns
    (recv_values, recv_scales), *_ = buffer.dispatch((values, scales), handle=handle)
    assert recv_values.dtype == torch.float8_e4m3fn and recv_scales.is_contiguous()
    mine = [(row, t) for row, (s, t) in enumerate(expected) if s == rank]
    for row, token in mine:
        assert bits(recv_values[row]) == bits(values[token]) and bits(recv_scales[row]) == bits(scales[token])
    buffer.destroy()


def test_normal_mode_of_deep_ep(rng):
    run(check_normal_mode, rng)


def check_low_latency_mode(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    buffer = deep_ep.Buffer(torch.distributed.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    stats = torch.zeros(8, dtype=torch.int32, device=device)
    for use_fp8 in (False, True):
        for hooked in (False, True):
            recv, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, use_fp8=use_fp8, return_recv_hook=hooked, async_finish=not hooked,
                cumulative_local_expert_recv_stats=stats)
            hook() if hooked else event.current_stream_wait()
            values = recv[0].float().unflatten(-1, (-1, 128)) * recv[1][..., None] if use_fp8 else recv
            values = values.flatten(2).to(torch.bfloat16) if use_fp8 else values
            source, ranges = handle[0], handle[1]
            for local in range(8):
                routes = [route for route in routes_to(step, rank) if route[0] == rank * 8 + local]
                assert int(counts[local]) == len(routes)
                assert source[local, : len(routes)].tolist() == [t for *_, t, _ in routes]
                assert sum(int(r) & 0xFFFFFFFF for r in ranges[local]) == len(routes)
                for position, (_, s, t, _) in enumerate(routes):
                    assert torch.allclose(values[local, position].float(), tensor(step.tokens[s][t], device).float(),
                                          rtol=0.07 if use_fp8 else 0, atol=0.02 if use_fp8 else 0)
            out = torch.full_like(x, float("nan"))
            y, event, hook = buffer.low_latency_combine(
                values, ids, weights, handle, out=out, return_recv_hook=hooked, async_finish=not hooked)
            hook() if hooked else event.current_stream_wait()
            scale = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
            assert y is out and torch.allclose(y.float(), x.float() * scale, rtol=0.1, atol=0.05)
    assert stats.sum() == 4 * len(routes_to(step, rank))
    buffer.destroy()


def test_low_latency_mode_of_deep_ep(rng):
    run(check_low_latency_mode, rng)


def check_layer(rank, device, rng):
    torch.manual_seed(7)
    layer = ferry.torch.MoE(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=64, ffn=32, max_tokens=16, device=device)
    x = torch.randn(3, 5, 64, device=device, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape and bool(y.isfinite().all()) and bool(x.grad.abs().sum() > 0)
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters()) and bool(layer.router.weight.grad.abs().sum() > 0)


def test_a_layer_in_processes(rng):
    run(check_layer, rng)


def check_operators(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    exchange = exchange_of(device)
    expected = routes_to(step, rank)
    for recorded in (False, True):
        used = [torch.full((exchange.capacity, HIDDEN), float("nan"), dtype=x.dtype, device=device) for _ in range(3)]
        del used  # PyTorch may reuse this memory, full of NaN, for the rows
        rows = ferry.torch.dispatch(exchange, x.detach().requires_grad_(recorded), ids, weights)
        exchange.synchronize()
        total = int(rows.row_offsets[-1])
        assert rows.source[:total].cpu().tolist() == [list(route[1:]) for route in expected]
        assert bits(rows.data[:total].detach()) == b"".join(step.tokens[s][t].tobytes() for _, s, t, _ in expected)
        assert total < len(rows.data) and not rows.data[total:].any() and not rows.weight[total:].any()


def test_operators_in_processes(rng):
    run(check_operators, rng)


def check_graphs(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    x, ids, weights = (torch.nn.functional.pad(t, (0, 0, 0, MOST - len(t)), value=-1) for t in (x, ids, weights))
    buffer = deep_ep.Buffer(torch.distributed.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    exchange = exchange_of(device)

    def pair():
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        low_latency = buffer.low_latency_combine(recv, ids, weights, handle)[0]
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        return low_latency, ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight)

    eager = [y.clone() for y in pair()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = pair()
    for _ in range(3):
        for y in captured:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert [bits(y) for y in captured] == [bits(y) for y in eager]
    after = exchange.dispatch(x, ids, weights)
    assert after.wait_total() == int(after.total)  # although replays advanced the call number
    ids[:] = ids.flip(0).clone()  # other routes at the same address
    eager = [y.clone() for y in pair()]
    graph.replay()
    torch.cuda.synchronize()
    assert [bits(y) for y in captured] == [bits(y) for y in eager]
    buffer.destroy()


@on_gpus
def test_graphs_capture_and_replay(rng):
    run(check_graphs, rng)


def check_strided_numbers(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    exchange = exchange_of(device)

    def in_columns(dense):
        wide = torch.full((len(dense), TOP_K + 3), 10**6, dtype=dense.dtype, device=device)
        wide[:, :TOP_K] = dense
        return wide[:, :TOP_K]

    results = []
    for used, by in [(ids, weights), (in_columns(ids), in_columns(weights)), (ids.T.contiguous().T, weights.T.contiguous().T)]:
        rows = exchange.dispatch(x, used, by)
        y = exchange.combine(rows.data, rows.plan, topk_weights=by)
        results.append((rows.wait_total(), bits(rows.weight[: rows.wait_total()]), bits(y)))
    assert results[0] == results[1] == results[2]
    if device.type == "cuda":  # a copy on the current stream would race with the call
        x, ids = (torch.nn.functional.pad(t, (0, 0, 0, MOST - len(t)), value=-1) for t in (x, ids))
        with pytest.raises(ferry.UsageError, match="weights: expected a C-contiguous array"):
            exchange.dispatch(x, ids, torch.ones(TOP_K, MOST, device=device).T, stream=torch.cuda.Stream())


def test_numbers_of_any_strides(rng):
    run(check_strided_numbers, rng)


def kept_by(policy, capacity, step):
    """The ids of each rank that the policy keeps, by loops over all ranks' routes."""
    after = [np.full_like(ids, -1) for ids in step.ids]
    for expert in range(EXPERTS):
        routes = [(r, t, k) for r, ids in enumerate(step.ids) for t, k in np.argwhere(ids == expert)]
        if policy == "probs":
            routes.sort(key=lambda route: -step.weights[route[0]][route[1], route[2]])
        for r, t, k in routes[:capacity]:
            after[r][t, k] = expert
    return after


def check_dropping(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    exchange = exchange_of(device, layout="expert_padded", capacity=3)
    for policy in ("probs", "position"):

        def layer():
            kept = ferry.torch.drop_routes(ids, weights, drop_policy=policy, exchange=exchange)
            rows = ferry.torch.dispatch(exchange, x, kept, weights)
            return kept, rows.data, ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight)

        expected = kept_by(policy, 3, step)
        found = layer()
        exchange.synchronize()
        assert found[0].tolist() == expected[rank].tolist() and found[1].shape == (EXPERTS // RANKS, 3, HIDDEN)
        assert bits(found[2]) == expected_result(dataclasses.replace(step, ids=expected), rank)
        if device.type == "cuda":  # a call that waited for the host could not be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = layer()
            graph.replay()
            torch.cuda.synchronize()
            assert [bits(one) for one in captured] == [bits(one) for one in found]
    exchange.check()


def test_dropping(rng):
    run(check_dropping, rng)


def check_device_arguments(rank, device, rng):
    step = step_of(rng)
    x, ids, weights = inputs(step, rank, device)
    exchange = exchange_of(device)
    for bad, pattern in (((x.cpu(), ids), "tokens: expected an array on cuda"), ((x, ids.cpu()), "ids: expected an array on cuda")):
        with pytest.raises(ferry.UsageError, match=pattern):
            exchange.dispatch(*bad)
        try:  # every rank refused this call; any of the refusals may be reported first
            exchange.synchronize()
        except ferry.UsageError as error:
            assert "refused" in str(error)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    rows = exchange.dispatch(x, ids, weights, stream=stream)
    y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight, stream=stream.cuda_stream, sm_limit=4)
    stream.synchronize()
    assert bits(y) == expected_result(step, rank)
    count = torch.tensor([0], dtype=torch.int32, device=device)
    none = exchange.dispatch(x, ids, weights, count=count)
    assert int(none.total) == 0
    with pytest.raises(ferry.UsageError, match="expected an array on"):
        exchange_of(torch.device("cpu")).dispatch(x, ids)


@on_gpus
def test_arguments_of_device_exchanges(rng):
    run(check_device_arguments, rng)


def check_cupy(rank, device, rng):
    import cupy

    step = step_of(rng, dtype=np.float32)
    with cupy.cuda.Device(device.index):
        x, ids, weights = (cupy.asarray(array[rank]) for array in (step.tokens, step.ids, step.weights))
        exchange = exchange_of(device, format="fp32", combine_type="fp32", reduction="exact")
        rows = exchange.dispatch(x, ids, weights)
        y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        assert isinstance(y, cupy.ndarray) and isinstance(rows.source, cupy.ndarray)
        scale = cupy.where(ids >= 0, weights, 0).sum(1, keepdims=True)
        assert bool(cupy.allclose(y, x * scale, rtol=1e-5, atol=1e-5))


@on_gpus
def test_arrays_of_cupy(rng):
    pytest.importorskip("cupy")
    run(check_cupy, rng)


def check_all_to_all_v(rank, device, rng):
    """The transport of Group.torch(): parts of any size, at any offset."""
    import torch.distributed as dist

    from ferry._torch_group import make_all_to_all_v, own_groups

    meeting, group = own_groups(dist, dist.group.WORLD, BACKEND)
    assert own_groups(dist, dist.group.WORLD, BACKEND) == (meeting, group)
    assert len({id(dist.group.WORLD), id(meeting), id(group)}) == 3
    all_to_all_v = make_all_to_all_v(dist, group)
    gap = 5
    for most in (0, 1, 3000):
        messages = [[rng.bytes(int(rng.integers(most + 1)) if to != source else 0) for to in range(RANKS)] for source in range(RANKS)]
        sent, expected = messages[rank], [messages[source][rank] for source in range(RANKS)]
        send_offsets, receive_offsets = ([sum(map(len, parts[:p])) + gap * p for p in range(RANKS)] for parts in (sent, expected))
        send = b"".join(part + bytes(gap) for part in sent)
        receive = bytearray(sum(map(len, expected)) + gap * RANKS)
        all_to_all_v(0, memoryview(send), list(map(len, sent)), send_offsets,
                     memoryview(receive), list(map(len, expected)), receive_offsets)
        assert bytes(receive) == b"".join(part + bytes(gap) for part in expected)


def test_the_transport_of_a_torch_group(rng):
    run(check_all_to_all_v, rng)


def check_simulated_hosts(rank, device, rng):
    """Ranks of two hosts, which take turns, over the transport of the process group."""
    import os

    os.environ["FERRY_HOST_ID"] = f"host {rank % 2}"
    me = ferry.Group.torch().join()
    exchange = ferry.Exchange(me, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, backend="collective")
    nodes = me.topology
    assert nodes.simulated and [nodes.node_of(r) for r in range(RANKS)] == [r % 2 for r in range(RANKS)]
    assert exchange.config.reduction_level == "node"
    step = step_of(rng)
    rows = exchange.dispatch(*inputs(step, rank, torch.device("cpu")))
    expected = routes_to(step, rank)
    assert bits(rows.data[:rows.total]) == b"".join(step.tokens[s][t].tobytes() for _, s, t, _ in expected)


@pytest.mark.skipif(BACKEND != "gloo", reason="host memory, over gloo")
def test_simulated_hosts_in_a_process_group(rng):
    run(check_simulated_hosts, rng)


def check_collective(rank, device, rng):
    """The backend 'collective' over that transport, on host memory, beside traffic of the program's own."""
    import torch.distributed as dist

    host = torch.device("cpu")
    exchange = exchange_of(host, backend="collective", reduction="exact")
    for _ in range(5):
        step = step_of(rng)
        x, ids, weights = inputs(step, rank, host)
        exchange.dispatch_send(x, ids, weights)
        dist.barrier()
        rows = exchange.dispatch_receive()
        expected = routes_to(step, rank)
        assert bits(rows.data[:rows.total]) == b"".join(step.tokens[s][t].tobytes() for _, s, t, _ in expected)
        y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        total = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        assert torch.allclose(y.float(), x.float() * total, rtol=2**-6, atol=2**-6)


def test_the_backend_collective(rng):
    run(check_collective, rng)
