"""HybridEPBuffer with PyTorch: the checks of NumPy, in threads and in processes of a process group; autograd functions."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import fp8
from hybrid_steps import HIDDEN, Steps, buffer_of, fp8_rows, random_case
from oracle import same_bits
from torch_processes import RANKS, run, tensor, to_numpy


def steps_of(case, me, buffer, device="cpu"):
    def put(array):
        return tensor(array.view(np.uint8), device).view(torch.float8_e4m3fn) if array.dtype == fp8 else tensor(array, device)

    return Steps(case, me, buffer, put, to_numpy)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("by", ["map", "ids"])
def test_all_calls(rng, ranks, by):
    seeds, case = rng.integers(1 << 31, size=ranks), random_case(rng, ranks)

    def body(rank):
        steps, mine = steps_of(case, rank.index, buffer_of(rank, case)), np.random.default_rng(seeds[rank.index])
        steps.check_permuted(by=by, rng=mine)
        steps.check_permuted(8, by=by, rng=mine)
        steps.check_permuted(8, 16, by=by, rng=mine, non_blocking=True)
        steps.check_plain(by, mine)

    ferry.Group.threads(ranks).run(body)


def all_calls_in_a_process(rank, device, rng):
    case = random_case(rng, RANKS)
    steps = steps_of(case, rank, buffer_of(torch.distributed.group.WORLD, case), device)
    assert steps.buffer.group is torch.distributed.group.WORLD
    steps.check_permuted(16)
    steps.check_permuted(16, 32, non_blocking=True)
    steps.check_permuted(16, 1600)
    steps.check_plain()
    for element in (np.uint8, fp8):
        steps.check_fp8(*fp8_rows(rng, case, element), 16)
    handle = steps.check_permuted()
    assert handle[-1].device == steps.x.device and handle[-1].dtype == torch.int32 and handle[-1].shape == (1,)
    steps.buffer.destroy()


def test_all_calls_in_processes(rng):
    run(all_calls_in_a_process, rng)


def all_calls_between_nodes(rank, device, rng):
    ranks = torch.distributed.get_world_size()
    nodes = [2 * each // ranks for each in range(ranks)]
    os.environ["FERRY_HOST_ID"] = f"host {nodes[rank]}"
    case = random_case(rng, ranks, nodes)
    steps = steps_of(case, rank, buffer_of(torch.distributed.group.WORLD, case))
    assert steps.buffer.num_of_nodes == 2
    steps.check_permuted(8)
    steps.check_permuted(8, 32, non_blocking=True)
    steps.check_plain()
    steps.buffer.destroy()


def test_all_calls_between_nodes(rng):
    run(all_calls_between_nodes, rng, 4, "gloo")


def test_where_the_counts_lie(rng):
    """On the host after a call that waited for them, else where the rows lie."""
    case = random_case(rng, 1)

    def body(rank):
        steps = steps_of(case, 0, buffer_of(rank, case))
        for settings in ({}, {"num_permuted_tokens": 64, "non_blocking": True}):
            *_, counts, handle = steps.buffer.dispatch_with_permute(hidden=steps.x, routing_map=steps.map, **settings)
            assert counts.dtype == torch.int64 and counts.device.type == "cpu" and handle[7].dtype == torch.int32

    ferry.Group.threads(1).run(body)


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, buffer, routing_map):
        ctx.buffer = buffer
        rows, row_probs, _, _, ctx.handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map, probs=probs)
        return rows, row_probs, ctx.handle

    @staticmethod
    def backward(ctx, d_rows, d_probs, _):
        d_x, d_probs = ctx.buffer.combine_with_unpermute(hidden=d_rows, probs=d_probs, handle=ctx.handle)
        return d_x, d_probs, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]

    @staticmethod
    def backward(ctx, d_y):
        return ctx.buffer.dispatch_with_permute(hidden=d_y, handle=ctx.handle)[0], None, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients(rng, ranks):
    """Of a layer whose experts multiply a row by its probability and by a number of the expert, against one dense layer."""
    case = random_case(rng, ranks, density=0.5)
    scales = rng.random(case.experts, np.float32)

    def body(rank):
        me, buffer = rank.index, buffer_of(rank, case)
        x, probs = (tensor(each[me], "cpu").requires_grad_() for each in (case.hidden, case.probs))
        routing_map = tensor(case.maps[me], "cpu")
        rows, row_probs, handle = Dispatch.apply(x, probs, buffer, routing_map)
        of_rows = np.concatenate([np.full(len(group), scales[e]) for e, group in zip(case.mine(me), case.groups(me))])
        y = Combine.apply((rows * (row_probs * torch.from_numpy(of_rows).float())[:, None]).bfloat16(), buffer, handle)
        weights = torch.from_numpy(np.random.default_rng(me).standard_normal(y.shape).astype(np.float32))
        (y.float() * weights).sum().backward()

        dense_x, dense_probs = (t.detach().float().requires_grad_() for t in (x, probs))
        dense = ((dense_probs * torch.from_numpy(scales) * routing_map).sum(1)[:, None] * dense_x)
        (dense * weights).sum().backward()
        torch.testing.assert_close(y.float(), dense, rtol=0.03, atol=0.03)
        torch.testing.assert_close(x.grad.float(), dense_x.grad, rtol=0.03, atol=0.03)
        torch.testing.assert_close(probs.grad, dense_probs.grad, rtol=0.03, atol=0.3)

    ferry.Group.threads(ranks).run(body)


def test_tensors_that_require_gradients_and_strided_ones(rng):
    case = random_case(rng, 1)

    def body(rank):
        steps = steps_of(case, 0, buffer_of(rank, case))
        expected, expected_probs, *_ = steps.buffer.dispatch_with_permute(hidden=steps.x, routing_map=steps.map, probs=steps.probs)
        x = torch.empty(HIDDEN, len(steps.x), dtype=torch.bfloat16).T.copy_(steps.x).requires_grad_()
        probs = steps.probs.t().contiguous().t().requires_grad_()
        rows, row_probs, *_, handle = steps.buffer.dispatch_with_permute(hidden=x, routing_map=steps.map, probs=probs)
        assert not rows.requires_grad and same_bits(to_numpy(rows), to_numpy(expected)) and same_bits(to_numpy(row_probs), to_numpy(expected_probs))
        expanded = torch.ones((), dtype=torch.bfloat16).expand(rows.shape)  # the gradient of a sum
        y, _ = steps.buffer.combine_with_unpermute(hidden=expanded, handle=handle)
        assert y[:, 0].tolist() == case.maps[0].sum(1).tolist()

    ferry.Group.threads(1).run(body)


def test_arrays_of_different_frameworks(rng):
    case = random_case(rng, 1)

    def body(rank):
        steps = steps_of(case, 0, buffer_of(rank, case))
        with pytest.raises(ferry.UsageError, match="routing_map: expected an array of the framework and device of hidden, got ndarray"):
            steps.buffer.dispatch(steps.x, routing_map=case.maps[0])

    ferry.Group.threads(1).run(body)


def test_indices_to_map(rng):
    ids, weights = torch.tensor([[2, -1], [0, 3]]), torch.rand(2, 2)
    routing_map, probs = deep_ep.hybrid_ep_buffer.indices_to_map(ids, weights, 2, 4)
    assert routing_map.dtype == torch.bool and routing_map.tolist() == [[False, False, True, False], [True, False, False, True]]
    assert torch.equal(probs.gather(1, ids.clamp(min=0))[ids >= 0], weights[ids >= 0])
