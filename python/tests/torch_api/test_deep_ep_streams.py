"""Streams, memory and kernel names of ferry.deep_ep on GPUs, with one process for each rank."""

import json
import pathlib
import tempfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
from oracle import bf16, random_step
from torch_processes import GPUS, RANKS, bits, run, tensor

HIDDEN, MOST, EXPERTS, TOP_K = 512, 40, 8 * RANKS, 4
BUSY_CYCLES = 100_000_000  # tens of milliseconds
on_gpus = pytest.mark.skipif(not GPUS, reason="no GPU here")


def start(rank, device, rng):
    """(x, ids, weights, buffer); the first calls have made the exchanges."""
    step = random_step(rng, RANKS, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, most=MOST, dtype=bf16, ids=np.int64)
    x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
    buffer = deep_ep.Buffer(torch.distributed.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    hooked_pair(buffer, x, ids, weights)
    torch.cuda.synchronize()
    return x, ids, weights, buffer


def hooked_pair(buffer, x, ids, weights, stream=None):
    """A pair whose calls are made on `stream` and whose hooks are called on the current stream."""
    stream = stream or torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        recv, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=True)
    hook()
    with torch.cuda.stream(stream):
        y, _, hook = buffer.low_latency_combine(recv, ids, weights, handle, return_recv_hook=True)
    hook()
    return y


def profile(body, file):
    """(lines of the profiler's table, kernels of its trace)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    table = profiler.key_averages().table(sort_by="cuda_time_total", max_name_column_width=100)
    return table.splitlines(), [event for event in events if event.get("cat") == "kernel"]


def check_names(rank, device, rng):
    x, ids, weights, buffer = start(rank, device, rng)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with tempfile.TemporaryDirectory() as folder:
        lines, kernels = profile(
            lambda: [hooked_pair(buffer, x, ids, weights, side) for _ in range(3)], pathlib.Path(folder) / "trace.json")
    for phase in ("dispatch", "combine"):
        assert sum(phase in line for line in lines) == 1, lines
        of_phase = [kernel for kernel in kernels if f"::{phase}" in kernel["name"]]
        assert len(of_phase) == 6 and len({kernel["name"] for kernel in of_phase}) == 1, of_phase
        # Receive phases, too, run on the stream that was current at the call.
        assert len({kernel["args"]["stream"] for kernel in of_phase}) == 1, of_phase
        assert of_phase[0]["args"]["stream"] not in (0, 7), of_phase  # the default stream
    buffer.destroy()


@on_gpus
def test_both_phases_have_one_kernel_name_and_run_on_the_stream_of_the_call(rng):
    run(check_names, rng)


def keep_busy(stream):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)


def check_memory(rank, device, rng):
    x, ids, weights, buffer = start(rank, device, rng)
    private = buffer.get_comm_stream()
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    y = buffer.low_latency_combine(recv, ids, weights, handle)[0]
    torch.cuda.synchronize()

    # The input is freed, and its memory filled, before the dispatch has begun.
    mine = x.clone()
    keep_busy(private)
    again, counts_again, handle_again, event, _ = buffer.low_latency_dispatch(mine, ids, MOST, EXPERTS, use_fp8=False, async_finish=True)
    shape = mine.shape
    del mine
    noise = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(4)]
    event.current_stream_wait()
    assert counts_again.tolist() == counts.tolist()
    for expert, count in enumerate(counts.tolist()):
        assert bits(again[expert, :count]) == bits(recv[expert, :count])

    # The handle, with its plan, and the result are freed before the combine has begun.
    plan_bytes = handle_again.plan.storage.shape
    torch.cuda.synchronize()
    keep_busy(private)
    out = torch.empty_like(y)
    event = buffer.low_latency_combine(again, ids, weights, handle_again, async_finish=True, out=out)[1]
    kept = torch.empty_like(out)
    copied = torch.cuda.Event()
    with torch.cuda.stream(private):
        kept.copy_(out)
        copied.record()
    del handle_again, out
    noise += [torch.zeros(plan_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    noise += [torch.full_like(y, float("nan")) for _ in range(2)]
    event.current_stream_wait()
    copied.synchronize()
    assert bits(kept) == bits(y)
    assert all(bool(tensor.isnan().all()) for tensor in noise if tensor.dtype == torch.bfloat16)
    assert not any(bool(tensor.any()) for tensor in noise if tensor.dtype == torch.uint8)
    buffer.destroy()


@on_gpus
def test_memory_of_asynchronous_calls_is_not_given_to_others(rng):
    run(check_memory, rng)


def check_memory_without_a_wait(rank, device, rng):
    """Asynchronous calls for whose events the current stream never waits, or another stream does."""
    x, ids, weights, buffer = start(rank, device, rng)
    private, other = buffer.get_comm_stream(), torch.cuda.Stream()
    recv, counts, *_ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    new_routes = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
                      topk_idx=ids, topk_weights=weights)
    rows, *_, handle, _ = buffer.dispatch(x, **new_routes)
    calls = {
        "low latency": (lambda mine: buffer.low_latency_dispatch(mine, ids, MOST, EXPERTS, use_fp8=False, async_finish=True)[0::3],
                        lambda received: b"".join(bits(received[e, :count]) for e, count in enumerate(counts.tolist())), recv),
        "normal": (lambda mine: buffer.dispatch(mine, handle=handle, async_finish=True)[0::5], bits, rows),
    }
    for call, bits_of, expected in calls.values():
        for waits_elsewhere in (False, True):
            torch.cuda.synchronize()
            mine = x.clone()
            keep_busy(private)
            received, event = call(mine)
            if waits_elsewhere:
                with torch.cuda.stream(other):
                    event.current_stream_wait()
            shape = mine.shape
            del mine, event
            noise = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(4)]
            torch.cuda.synchronize()
            assert bits_of(received) == bits_of(expected)
            assert all(bool(tensor.isnan().all()) for tensor in noise)
    buffer.destroy()


@on_gpus
def test_memory_of_asynchronous_calls_without_a_wait(rng):
    run(check_memory_without_a_wait, rng)


def check_reuse_of_memory(rank, device, rng):
    """After the wait the memory of an asynchronous call is free at once, because nothing was recorded on a stream."""
    x, ids, weights, buffer = start(rank, device, rng)
    addresses = set()
    for _ in range(20):
        recv, _, _, event, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, async_finish=True)
        keep_busy(buffer.get_comm_stream())
        event.current_stream_wait()
        addresses.add(recv.data_ptr())
        del recv, event
    torch.cuda.synchronize()
    assert len(addresses) <= 2, addresses
    buffer.destroy()


@on_gpus
def test_memory_of_asynchronous_calls_is_used_again_after_the_wait(rng):
    run(check_reuse_of_memory, rng)


def check_order(rank, device, rng):
    """Calls on different streams run in the order in which they were made."""
    x, ids, weights, buffer = start(rank, device, rng)
    expected = hooked_pair(buffer, x, ids, weights)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for turn in range(12):
        keep_busy(streams[turn % 3])
        results.append(hooked_pair(buffer, x, ids, weights, streams[turn % 3]))
    torch.cuda.synchronize()
    assert all(bits(y) == bits(expected) for y in results)
    buffer.destroy()


@on_gpus
def test_calls_on_several_streams(rng):
    run(check_order, rng)


def check_nvfp4(rank, device, rng):
    x, ids, weights, buffer = start(rank, device, rng)
    factor = torch.full((2,), 448 * 6 / 8.0, device=device)
    exchange = ferry.Exchange(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, backend="cuda",
                              layout="expert_padded", format="nvfp4-tiles")
    rows = exchange.dispatch(x, ids, global_scale=1.0 / factor[:1])
    exchange.synchronize()
    for given in (factor, factor[0], 448 * 6 / 8.0, np.float32(448 * 6 / 8.0)):
        (values, scales), counts, _, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_nvfp4=True, x_global_scale=given)
        torch.cuda.synchronize()
        assert counts.tolist() == rows.counts.tolist()
        for local, count in enumerate(counts.tolist()):
            assert torch.equal(values.permute(2, 0, 1)[local, :count], rows.data[local, :count].view(torch.uint8))
            first, tall = int(rows.tile_offsets[local]), -(-count // 128)
            assert torch.equal(scales.permute(5, 2, 4, 0, 1, 3)[local, :tall].view(torch.uint8),
                               rows.scales[first : first + tall].view(torch.uint8))
    buffer.destroy()


@on_gpus
def test_nvfp4_of_low_latency_mode_is_that_of_an_exchange(rng):
    run(check_nvfp4, rng)
