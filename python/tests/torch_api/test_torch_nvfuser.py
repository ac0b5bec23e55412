"""ferry.nvfuser with tensors, one process for each rank; on GPUs with the backend cuda."""

import os

import pytest

torch = pytest.importorskip("torch")

import numpy as np

import ferry
import ferry.nvfuser
from format_loops import TYPES
from nvfuser_case import NvfuserCase
from nvfuser_steps import CASE, CASE_IDS, case_tokens, expected_combine, expected_dispatch, output_of
from oracle import bf16, random_step
from torch_processes import GPUS, RANKS, bits, run, tensor, to_numpy


def exchange_of(device, **settings):
    where = {"backend": "cuda" if device.type == "cuda" else "cpu"}
    return ferry.nvfuser.Exchange(ferry.Group.torch(), **(where | settings))


def check_nan(rank, device, rng):
    """Whatever the framework's sums make of a NaN."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        exchange = exchange_of(device, experts=RANKS, top_k=2, hidden=8, max_tokens=1, dtype=name)
        received = exchange.dispatch(torch.ones((1, 8), dtype=dtype, device=device), torch.tensor([[0, RANKS - 1]], device=device))
        rows = torch.full_like(received.recv_x, float("nan"))
        y = exchange.combine(-rows, *received[2:])
        integers, nan = (torch.int32, 0x7FFFFFFF) if name == "fp32" else (torch.int16, 0x7FFF)
        assert y.dtype == dtype and set(y.view(integers).flatten().tolist()) == {nan}


def check_case(rank, device, rng):
    exchange = exchange_of(device, experts=2 * RANKS, top_k=1, hidden=4, max_tokens=4, dtype="fp32")
    x, ids = tensor(case_tokens(rank), device), tensor(CASE_IDS, device)
    received = exchange.dispatch(x, ids)
    assert all(array.device == device for array in received)
    if RANKS == 2:
        assert [array.tolist() for array in received[1:]] == list(CASE[rank])
    assert torch.equal(exchange.combine(received.recv_x, *received[2:]), x)
    with pytest.raises(ferry.UsageError, match="rank 1: recv_src_idx: int32"):
        index = received.recv_src_idx.int() if rank == 1 else received.recv_src_idx
        exchange.combine(received.recv_x, index, *received[3:])
    for name in ("recv_src_idx", "recv_src_rank", "n_tokens_to_rank", "n_tokens_from_rank"):
        with pytest.raises(ferry.UsageError, match=f"rank 1: {name}: "):
            given = received._replace(**{name: getattr(received, name).to("meta")}) if rank == 1 else received
            exchange.combine(given.recv_x, *given[2:])
    assert torch.equal(exchange.combine(received.recv_x, *received[2:]), x)


def test_the_case_of_nvfuser(rng):
    run(check_case, rng)


def check_random_ids(rank, device, rng, **where):
    for top_k in (1, 2, 3, 4):
        exchange = exchange_of(device, experts=2 * RANKS + 1, top_k=top_k, hidden=512, max_tokens=40, **where)
        for most in (40, 0):
            step = random_step(rng, RANKS, experts=2 * RANKS + 1, top_k=top_k, hidden=512, most=most, ids=np.int64)
            received = exchange.dispatch(tensor(step.tokens[rank], device), tensor(step.ids[rank], device))
            x, *integers = expected_dispatch(step, rank)
            assert bits(received.recv_x) == x.tobytes() and received.recv_x.dtype == torch.bfloat16
            assert [array.tolist() for array in received[1:]] == [array.tolist() for array in integers]
            y = exchange.combine(tensor(output_of(x.astype(bf16), rank), device), *received[2:])
            assert y.dtype == torch.bfloat16 and bits(y) == expected_combine(step, rank).tobytes()


def test_random_ids_agree_with_loops(rng):
    run(check_random_ids, rng)


def check_uneven_maps(rank, device, rng, **where):
    """Experts on any ranks; memory of the caller and of the exchange."""
    where = where or {"backend": "cuda" if device.type == "cuda" else "cpu"}
    for number in range(12):
        case = NvfuserCase(rng, list(TYPES)[number % 3], RANKS)
        case.check(ferry.Group.torch(), rank, lambda array: tensor(array, device), to_numpy, **where)


def test_uneven_maps_agree_with_loops(rng):
    run(check_uneven_maps, rng)


def check_over_nccl(rank, device, rng):
    check_random_ids(rank, device, rng, backend="collective", engine="nccl", memory="device")
    check_uneven_maps(rank, device, rng, backend="collective", engine="nccl", memory="device")


def check_over_nccl_on_two_hosts(rank, device, rng):
    os.environ["FERRY_HOST_ID"] = f"host {2 * rank // RANKS}"
    for hops in ("one", "two"):
        for check in (check_random_ids, check_uneven_maps):
            check(rank, device, rng, backend="collective", engine="nccl", memory="device", hops=hops)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("check", [check_over_nccl, check_over_nccl_on_two_hosts])
def test_gpu_memory_over_nccl(rng, check):
    run(check, rng)


def test_nan_payloads_of_tensors_are_not_kept(rng):
    run(check_nan, rng)


def test_a_result_that_no_call_can_write_is_refused_on_every_rank():
    def body(rank):
        exchange = ferry.nvfuser.Exchange(rank, experts=4, top_k=1, hidden=4, max_tokens=4, dtype="fp32")
        x = torch.ones(4, 4)
        received = exchange.dispatch(x, torch.tensor([0, 2, 3, 2]))
        for wrong, text in ((torch.zeros(4, 4, requires_grad=True), "rank 1: out: requires gradients"),
                            (torch.zeros(1, 4).expand(4, 4), "rank 1: out: several elements are one in memory")):
            with pytest.raises(ferry.UsageError, match=text):
                exchange.combine(received.recv_x, *received[2:], out=wrong if rank.index else None)
        assert torch.equal(exchange.combine(received.recv_x, *received[2:]), x)

    ferry.Group.threads(2).run(body)
