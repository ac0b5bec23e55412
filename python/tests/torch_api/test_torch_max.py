"""ferry.max with tensors: in host memory, and one process for each rank, on GPUs with the backend cuda."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np

import ferry
import ferry.max
from max_steps import expected_dispatch, expected_sums, outputs_of
from oracle import random_step
from torch_processes import RANKS, run, tensor


def test_tensors_give_the_results_of_arrays(rng):
    step = random_step(rng, 3, experts=7, top_k=2, hidden=24, most=9, dtype=np.float32, ids=np.int64)

    def body(rank):
        me = rank.index
        exchange = ferry.max.Exchange(rank, experts=7, top_k=2, hidden=24, max_tokens=9, shared_experts=1, format="fp32",
                                      combine_type="fp32")
        exchange.ep_dispatch_async(torch.from_numpy(step.tokens[me]), torch.from_numpy(step.ids[me]))
        received = exchange.ep_dispatch_wait()
        got = [received.output_tokens, *received[2:7]]
        assert all(isinstance(array, torch.Tensor) for array in got)
        for array, expected in zip(got, expected_dispatch(step, me, 1)):
            assert array.numpy().dtype == expected.dtype and np.array_equal(array.numpy(), expected)
        rows = torch.from_numpy(outputs_of(received.output_tokens.numpy(), received.row_offsets.tolist(),
                                           received.expert_ids.tolist()))
        exchange.ep_combine_async(rows, received.src_info, received.row_offsets, received.counts,
                                  router_weights=torch.from_numpy(step.weights[me]))
        y = exchange.ep_combine_wait()
        assert np.array_equal(y.numpy(), expected_sums(step, me, step.weights[me], 1))
        with pytest.raises(ferry.UsageError, match=r"rank 1: counts: int64 \[\d, 3\], must be int32"):
            counts = received.counts.to(torch.int64) if me == 1 else received.counts
            exchange.ep_fused_combine(rows, received.src_info, received.row_offsets, counts)

    ferry.Group.threads(3).run(body)


def check_processes(rank, device, rng):
    """Arrays of device memory are longer than those of host memory: what they hold is the same."""
    settings = {"experts": 2 * RANKS + 1, "top_k": 2, "hidden": 24}
    exchange = ferry.max.Exchange(ferry.Group.torch(), max_tokens=9, shared_experts=1, format="fp32", combine_type="fp32",
                                  backend="cuda" if device.type == "cuda" else "cpu", **settings)
    for split in (False, True):
        step = random_step(rng, RANKS, most=9, dtype=np.float32, ids=np.int64, **settings)
        x, ids, weights = (tensor(each[rank], device) for each in (step.tokens, step.ids, step.weights))
        if split:
            exchange.ep_dispatch_async(x, ids)
            received = exchange.ep_dispatch_wait()
        else:
            received = exchange.ep_fused_dispatch(x, ids)
        rows, offsets, experts, stats, info, counts = expected_dispatch(step, rank, 1)
        got = [received.output_tokens, *received[2:7]]
        assert all(array.device == device for array in got)
        for array, expected in zip(got, (rows, offsets, experts, stats, info, counts)):
            array = array.cpu().numpy()
            assert array.dtype == expected.dtype and np.array_equal(array[:len(expected)], expected)
        outputs = torch.zeros_like(received.output_tokens)
        outputs[:len(rows)] = tensor(outputs_of(rows, offsets.tolist(), experts.tolist()), device)
        residual = torch.ones_like(x)
        arguments = (outputs, received.src_info, received.row_offsets, received.counts)
        if split:
            exchange.ep_combine_async(*arguments, router_weights=weights, residual=residual, scale=2)
            y = exchange.ep_combine_wait()
        else:
            y = exchange.ep_fused_combine(*arguments, router_weights=weights, residual=residual, scale=2)
        exchange.synchronize()
        sums = expected_sums(step, rank, step.weights[rank], 1)
        assert np.allclose(y.cpu().numpy(), sums * 2 + 1, rtol=1e-5, atol=1e-4)
    with pytest.raises(ferry.UsageError, match="src_info|refused"):
        wrong = received.src_info.clone()
        wrong[1, 0] = 99
        exchange.ep_fused_combine(outputs, wrong, received.row_offsets, received.counts, router_weights=weights)
        exchange.synchronize()


def test_processes_give_the_arrays_of_loops(rng):
    run(check_processes, rng)


def check_refusals(rank, device, rng):
    """Rank 1 passes arrays that overlap or have no values; every rank's call ends, and the next one works."""
    exchange = ferry.max.Exchange(ferry.Group.torch(), experts=RANKS, top_k=1, hidden=64, max_tokens=4, format="fp32", combine_type="fp32",
                                  backend="cuda" if device.type == "cuda" else "cpu")
    odd, x, ids = rank == 1, torch.arange(128.0, device=device).reshape(2, 64) + 1000 * rank, torch.tensor([[1], [0]], device=device)
    received = exchange.ep_fused_dispatch(x, ids)
    outputs, inside = received.output_tokens.clone(), torch.zeros_like(x)
    source = inside.view(torch.int32).reshape(-1)[: received.src_info.numel()].reshape(-1, 2)
    source.copy_(received.src_info)

    def combine(rows=outputs, info=received.src_info, **options):
        return exchange.ep_fused_combine(rows, info, received.row_offsets, received.counts, **options)

    for call, words in (
        (lambda: combine(output_tokens=outputs[:2] if odd else torch.empty_like(x)), ("output_tokens (", "input_tokens (")),
        (lambda: combine(info=source if odd else received.src_info, output_tokens=inside), ("output_tokens (", "src_info (")),
        (lambda: exchange.ep_fused_dispatch(received.output_tokens[:2] if odd else x, ids), ("input_tokens (", "copy it out of the lane's memory first")),
        (lambda: exchange.ep_fused_dispatch(x.to("meta") if odd else x, ids), ("input_tokens: ", "on meta", "pass tensors on cpu or cuda")),
        (lambda: combine(outputs.to("meta") if odd else outputs), ("input_tokens: ",)),
        (lambda: combine(info=received.src_info.to("meta") if odd else received.src_info), ("src_info: ",)),
    ):
        with pytest.raises(ferry.UsageError, match=None if odd else "rank 1") as caught:
            call()
            exchange.synchronize()
        assert not odd or all(each in str(caught.value) for each in words), str(caught.value)
        y = combine()
        exchange.synchronize()
        assert torch.equal(y, x)


def test_overlap_and_tensors_without_values_are_refused(rng):
    run(check_refusals, rng)
