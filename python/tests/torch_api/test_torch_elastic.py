"""ElasticBuffer with tensors, and a process for each rank: on GPUs if there are any, else on the CPU over Gloo."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
from elastic_steps import expected_of, expected_sum, outputs_of, skewed_step
from oracle import bf16, experts_of, messages_to
from torch_processes import GPUS, RANKS, bits, run, tensor, to_numpy

CASES, MOST, HIDDEN = 6, 16, 256
on_gpus = pytest.mark.skipif(not GPUS, reason="no GPU here")


def buffer_of(**settings):
    return deep_ep.ElasticBuffer(torch.distributed.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, explicitly_destroy=True,
                                 **settings)


def random_case(rng):
    step = skewed_step(rng, RANKS, 4 * RANKS, 3, HIDDEN, MOST)
    settings = {"num_experts": 4 * RANKS, "do_expand": bool(rng.integers(2)), "do_cpu_sync": bool(rng.integers(2)),
                "expert_alignment": int(rng.choice([1, 8])), "async_with_compute_stream": bool(rng.integers(2))}
    return step, settings


def waited(results):
    if results[-1].event is not None:
        results[-1].current_stream_wait()
    return results


def check_rows_and_sums(rank, device, rng):
    multiple = bool(rng.integers(2))
    buffer = buffer_of(allow_multiple_reduction=multiple)
    for _ in range(CASES):
        step, settings = random_case(rng)
        expand, outputs = settings["do_expand"], outputs_of(step, rng, settings["do_expand"])
        expected, received = expected_of(step, rank, expand, settings["expert_alignment"]), len(messages_to(step, rank))
        x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
        stats = torch.zeros(len(expected.counts), dtype=torch.int32, device=device)
        recv_x, recv_ids, recv_weights, handle, _ = waited(buffer.dispatch(
            x, ids, weights, cumulative_local_expert_recv_stats=stats, **settings))
        rows = [row for row, source in enumerate(expected.rows) if source is not None]
        sources = [expected.rows[row] for row in rows]
        assert bits(recv_x[rows]) == b"".join(step.tokens[s][t].tobytes() for s, t, _ in sources)
        assert recv_x.device.type == device.type and recv_x.dtype == torch.bfloat16
        if expand:
            assert recv_ids is None
            assert bits(recv_weights[rows]) == b"".join(step.weights[s][t, k].tobytes() for s, t, k in sources)
        else:
            here = [np.isin(step.ids[s][t], experts_of(rank, step)) for s, t, _ in sources]
            assert recv_ids.dtype == ids.dtype
            assert recv_ids[rows].tolist() == [
                np.where(mine, step.ids[s][t] - 4 * rank, -1).tolist() for mine, (s, t, _) in zip(here, sources)]
            assert bits(recv_weights[rows]) == b"".join(
                np.where(mine, step.weights[s][t], np.float32(0)).tobytes() for mine, (s, t, _) in zip(here, sources))
        assert stats.tolist() == expected.counts == handle.num_unaligned_recv_tokens_per_expert.tolist()
        assert handle.psum_num_recv_tokens_per_expert.tolist() == expected.ends
        assert handle.psum_num_recv_tokens_per_scaleup_rank[-1].item() == received
        assert handle.recv_src_metadata[:received, 0].tolist() == [s * MOST + t for s, t in messages_to(step, rank)]
        assert handle.recv_src_metadata.device.type == handle.topk_idx.device.type == device.type

        again = waited(buffer.dispatch(x, handle=handle, topk_weights=weights, do_expand=expand, do_zero_padding=expand))
        assert bits(again[0][rows]) == bits(recv_x[rows]) and bits(again[2][rows]) == bits(recv_weights[rows])
        padding = [row for row, source in enumerate(expected.rows) if source is None]
        assert not again[0][padding].float().any() and not again[2][padding].any()

        y = torch.full_like(recv_x, float("nan"))
        if rows:
            y[rows] = tensor(np.stack([outputs[s, t, k if expand else rank] for s, t, k in sources]), device)
        bias = [rng.standard_normal(step.tokens[r].shape).astype(bf16) for r in range(RANKS)][rank]
        combined, back, _ = waited(buffer.combine(y, handle, recv_weights, tensor(bias, device), async_with_compute_stream=True))
        assert bits(combined) == expected_sum(step, rank, outputs, expand, not multiple, [bias]).tobytes()
        assert bits(back) == np.where(step.ids[rank] >= 0, step.weights[rank], np.float32(0)).tobytes()
    buffer.destroy()


def check_quantised_rows(rank, device, rng):
    buffer = buffer_of()
    for expand in (False, True):
        step, _ = random_case(rng)
        sent = [(rng.integers(0, 255, x.shape).astype(np.uint8), rng.random((len(x), 3)).astype(np.float32)) for x in step.tokens]
        values, scales = (tensor(array, device) for array in sent[rank])
        x = values.view(torch.float8_e4m3fn), scales.T.contiguous().T  # scales in columns, as quantisers often write them
        (recv, recv_scales), *_ = buffer.dispatch(
            x, tensor(step.ids[rank], device), num_experts=4 * RANKS, do_expand=expand, expert_alignment=8,
            use_tma_aligned_col_major_sf=True)
        rows = expected_of(step, rank, expand, 8).rows
        assert recv.dtype == torch.float8_e4m3fn and len(recv) == len(rows)
        if len(rows) > 1:
            assert recv_scales.stride() == (1, -(-len(rows) // 4) * 4)
        recv, recv_scales = to_numpy(recv.view(torch.uint8)), to_numpy(recv_scales)
        for row, source in enumerate(rows):
            if source is not None:
                assert recv[row].tobytes() == sent[source[0]][0][source[1]].tobytes()
                assert recv_scales[row].tobytes() == sent[source[0]][1][source[1]].tobytes()


def check_the_rest(rank, device, rng):
    group = torch.distributed.group.WORLD
    buffer = buffer_of()
    assert (buffer.rank_idx, buffer.num_ranks, buffer.group) == (rank, RANKS, group)
    assert buffer.num_bytes == deep_ep.ElasticBuffer.get_buffer_size_hint(group, MOST, HIDDEN) > 0
    sms = buffer.get_theoretical_num_sms(8, 2)
    assert sms % 2 == 0 and sms >= 4

    step, _ = random_case(rng)
    x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
    rows, _, theirs, handle, _ = buffer.dispatch(x.requires_grad_(), ids, weights.requires_grad_(), num_experts=4 * RANKS)
    y, w, _ = buffer.combine(rows.requires_grad_(), handle, theirs.requires_grad_(), x)
    assert not y.requires_grad and not w.requires_grad
    with torch.inference_mode():
        assert bits(buffer.dispatch(x, handle=handle)[0]) == bits(rows)

    mine = torch.arange(6, device=device).reshape(2, 3) + 10 * rank
    room = deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(group, (2, 3), mine.dtype)
    buffer.agrs_set_config(3 * room, 2)
    everything = torch.stack([torch.arange(6).reshape(2, 3) + 10 * r for r in range(RANKS)])
    with buffer.agrs_new_session():
        gathered, wait = buffer.all_gather(mine)
        wait()
        assert torch.equal(gathered.cpu(), everything)
        in_place = buffer.agrs_get_inplace_tensor(mine.shape, mine.dtype)
        in_place.copy_(mine)
        gathered, wait = buffer.all_gather(in_place)
        wait()
        assert torch.equal(gathered.cpu(), everything) and gathered[rank].data_ptr() == in_place.data_ptr()
    buffer.barrier(with_cpu_sync=True)
    wrong = {"x": x.float()} if rank else {}
    with pytest.raises(ferry.UsageError, match="x: expected bfloat16" if rank else "rank 1 refused dispatch"):
        buffer.dispatch(**({"x": x, "topk_idx": ids, "num_experts": 8 * RANKS} | wrong))
    buffer.destroy()


def check_graphs(rank, device, rng):
    buffer = buffer_of()
    step, _ = random_case(rng)
    x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
    for expand in (False, True):
        def layer():
            recv, _, w, handle, _ = buffer.dispatch(x, ids, weights, num_experts=4 * RANKS, do_expand=expand, do_cpu_sync=False)
            return recv, handle.psum_num_recv_tokens_per_expert, buffer.combine(recv, handle, w)[0]

        expected = [bits(part) for part in layer()[1:]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer()
        for _ in range(2):
            for part in captured:
                part.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert [bits(part) for part in captured[1:]] == expected


def check_streams(rank, device, rng):
    """Asynchronous calls wait for what they read and keep it; arrays of a handle wait for its dispatch."""
    buffer = buffer_of()
    step, _ = random_case(rng)
    x, ids, weights = (tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights))
    for expand in (False, True):
        settings = {"num_experts": 4 * RANKS, "do_expand": expand}
        recv, _, recv_weights, handle, _ = buffer.dispatch(x, ids, weights, **settings)
        ends, expected = handle.psum_num_recv_tokens_per_expert.tolist(), bits(recv)
        summed, back, _ = buffer.combine(recv, handle, recv_weights)
        expected_sum, expected_back = bits(summed), bits(back)
        torch.cuda.synchronize()
        for given in ({}, {"previous_event": True, "allocate_on_comm_stream": True}):
            torch.cuda._sleep(100_000_000)  # tens of milliseconds
            late = [tensor.clone() for tensor in (x, ids, weights)]
            given |= {"previous_event": buffer.capture()} if given else {}
            recv, _, recv_weights, handle, event = buffer.dispatch(*late, **settings, **given, async_with_compute_stream=True)
            del late
            torch.full((1 << 20,), float("nan"), device=device)  # takes the memory of `late` if that is free
            assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
            event.current_stream_wait()
            summed, back, event = buffer.combine(recv, handle, recv_weights, async_with_compute_stream=True)
            event.current_stream_wait()
            assert (bits(recv), bits(summed), bits(back)) == (expected, expected_sum, expected_back)


@pytest.mark.parametrize("body", [check_rows_and_sums, check_quantised_rows, check_the_rest])
def test_tensors(rng, body):
    run(body, rng)


@on_gpus
@pytest.mark.parametrize("body", [check_graphs, check_streams])
def test_on_gpus(rng, body):
    run(body, rng)
