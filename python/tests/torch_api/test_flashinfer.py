"""FlashInfer's expert-parallel layer with the communication backend "ferry": the layer and its calls against plain loops."""

import functools
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flashinfer")

import torch.distributed as dist
from flashinfer.moe_ep import BootstrapConfig, EpAlgorithm, EpLayout, FleetParams, MoEEpLayer, MoEEpTensors, MoEWeightPack
from flashinfer.moe_ep import SplitConfig
from flashinfer.moe_ep.core.comm.communication import MoEEpCommParams, available_communication_backends, create_communication
from flashinfer.moe_ep.core.kernel.base import SplitKernelBackend
from flashinfer.moe_ep.core.kernel.registry import register_split_kernel

import ferry
import ferry.integrations.flashinfer
from torch_processes import GPUS, run

EXPERTS, TOP_K, HIDDEN, FFN, MOST = 8, 3, 64, 24, 7


def mlp(x, w13, w2):
    gate, up = (x @ w13.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


class ExpertsConfig:
    kernel_name = "plain_experts"


@register_split_kernel("plain_experts")
class PlainExperts(SplitKernelBackend):
    """FlashInfer's kernels need a GPU of their own kind: these experts are a loop over rows."""

    kernel_name = classmethod(lambda cls: "plain_experts")

    def compute(self, ctx):
        rows, weights = ctx.expert_tensors.flatten(0, 1), self._transformed_weights
        assert ctx.recv_topk_idx_global and len(rows) == ctx.num_tokens
        local, first = len(weights.w13), len(weights.w13) * dist.get_rank()
        y = torch.full_like(rows, float("nan"))  # rows without tokens must not be read
        for row, (ids, factors) in enumerate(zip(ctx.recv_topk_idx.tolist(), ctx.recv_topk_weights)):
            mine = [(expert - first, factor) for expert, factor in zip(ids, factors) if first <= expert < first + local]
            if mine:
                y[row] = sum(factor * mlp(rows[row].float(), weights.w13[e].float(), weights.w2[e].float()) for e, factor in mine)
        return y.view(ctx.expert_tensors.shape)


def bootstrap(rank, ranks):
    return BootstrapConfig(world_size=ranks, rank=rank, stream=0)


def step_of(rng, ranks, most=MOST):
    """Tokens, ids and weights of every rank; one rank has none."""
    counts = [int(rng.integers(1, most + 1)) for _ in range(ranks)]
    counts[int(rng.integers(ranks))] = 0 if ranks > 1 else counts[0]
    ids = [np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(n)], dtype=np.int64).reshape(n, TOP_K) for n in counts]
    return ([torch.tensor(rng.standard_normal((n, HIDDEN))) for n in counts], [torch.tensor(each) for each in ids],
            [torch.tensor(rng.random((n, TOP_K)), dtype=torch.float32) for n in counts])


def check_layer(dtype, rank, device, rng):
    ranks = dist.get_world_size()
    ferry.integrations.flashinfer.register()
    assert "ferry" in available_communication_backends()
    w13 = torch.tensor(rng.standard_normal((EXPERTS, 2 * FFN, HIDDEN)) / HIDDEN**0.5).to(dtype)
    w2 = torch.tensor(rng.standard_normal((EXPERTS, HIDDEN, FFN)) / FFN**0.5).to(dtype)
    local = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    params = FleetParams(num_experts=EXPERTS, max_tokens_per_rank=MOST, token_hidden_size=HIDDEN, dtype_bytes=dtype.itemsize,
                         algorithm=EpAlgorithm.LOW_LATENCY, layout=EpLayout.RANK_MAJOR)
    layer = MoEEpLayer(bootstrap(rank, ranks), params, MoEWeightPack(w13[local].to(device), w2[local].to(device)),
                       backend=SplitConfig(comm="ferry", kernel=ExpertsConfig()))
    for most_of_step in (None, 5, None):
        tokens, ids, weights = step_of(rng, ranks, most_of_step or MOST)
        x = tokens[rank].to(dtype)
        y = layer(MoEEpTensors(hidden_states=x.to(device), topk_ids=ids[rank].to(device), topk_weights=weights[rank].to(device),
                               runtime_max_tokens_per_rank=most_of_step))
        expected = torch.stack([
            sum(w * mlp(x[token].float(), w13[e].float(), w2[e].float()) for e, w in zip(ids[rank][token].tolist(), weights[rank][token]))
            for token in range(len(x))]) if len(x) else x.float()
        assert y.shape == x.shape and y.dtype == dtype
        torch.testing.assert_close(y.cpu().float(), expected, **({"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else
                                                                 {"rtol": 1e-4, "atol": 1e-4}))
    layer.destroy()


@pytest.mark.parametrize("ranks, dtype", [(1, torch.bfloat16), (2, torch.float32), (4, torch.bfloat16)])
def test_the_layer_of_flashinfer(rng, ranks, dtype):
    run(functools.partial(check_layer, dtype), rng, ranks, "nccl" if GPUS >= ranks else "gloo")


def check_calls(rank, device, rng):
    """Quantised payloads: values and scales of any bytes, with the rank's own id for what belongs to no expert."""
    ranks = dist.get_world_size()
    ferry.integrations.flashinfer.register()
    for invalid in (-1, EXPERTS):
        params = MoEEpCommParams(num_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=MOST, hidden_size=HIDDEN, invalid_expert_id=invalid)
        communication = create_communication(bootstrap(rank, ranks), params, "ferry")
        _, ids, weights = step_of(rng, ranks)
        ids = [each.masked_fill(torch.tensor(rng.random(each.shape)) < 0.3, -1) for each in ids]
        values = [torch.tensor(rng.integers(0, 256, (len(each), 48)), dtype=torch.uint8) for each in ids]
        scales = [torch.tensor(rng.random((len(each), 4)), dtype=torch.float32) for each in ids]
        most = max(len(each) for each in ids)
        got = communication.dispatch(values[rank].to(device), ids[rank].int().to(device), weights[rank].to(device),
                                     hidden_states_scale=scales[rank].to(device), runtime_max_tokens_per_rank=most)
        first, last = rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks
        expected = [(source, token) for source in range(ranks) for token in range(len(ids[source]))
                    if any(first <= expert < last for expert in ids[source][token].tolist())]
        assert got.tokens_per_rank == most and len(got.hidden_states) == len(got.topk_ids) == ranks * most
        for row, (source, token) in enumerate(expected):
            assert torch.equal(got.hidden_states[row].cpu(), values[source][token])
            assert torch.equal(got.hidden_states_scale[row].cpu(), scales[source][token])
            for slot, expert in enumerate(ids[source][token].tolist()):
                here = first <= expert < last
                assert got.topk_ids[row, slot] == (expert if here else invalid)
                assert not here or got.topk_weights[row, slot] == weights[source][token, slot]
        assert (got.topk_ids[len(expected):] == invalid).all()
        with pytest.raises(ferry.UsageError, match="dispatch: called twice without a combine"):
            communication.dispatch(values[rank].to(device), ids[rank].to(device), hidden_states_scale=scales[rank].to(device))

        # Each rank returns its number: a token's sum is that of the ranks that hold an expert of it.
        y = communication.combine(torch.full((ranks, most, HIDDEN), 1.0 + rank, dtype=torch.bfloat16, device=device),
                                  output=torch.full((len(ids[rank]), HIDDEN), float("nan"), dtype=torch.bfloat16, device=device))
        for token, row in enumerate(y):
            holders = {expert * ranks // EXPERTS for expert in ids[rank][token].tolist() if expert >= 0}
            assert (row == sum(1.0 + holder for holder in holders)).all()
        with pytest.raises(ferry.UsageError, match="combine: called without a dispatch before it"):
            communication.combine(torch.zeros((ranks * most, HIDDEN), dtype=torch.bfloat16, device=device))
        communication.destroy()
        communication.destroy()


def test_calls_with_quantised_tokens(rng):
    run(check_calls, rng, 2, "nccl" if GPUS >= 2 else "gloo")


def check_mistakes(rank, device, rng):
    """A mistake of rank 1 ends the call on both ranks, which go on afterwards."""
    ferry.integrations.flashinfer.register()
    params = MoEEpCommParams(num_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=MOST, hidden_size=HIDDEN)
    communication = create_communication(bootstrap(rank, 2), params, "ferry")
    x = torch.ones((3, HIDDEN), dtype=torch.bfloat16, device=device)
    ids, weights = torch.tensor([[0, 4, 7]] * 3, device=device), torch.ones((3, TOP_K), device=device)

    def expect(match, call, right):
        with pytest.raises(ferry.UsageError, match=match if rank else "rank 1 refused"):
            (call if rank else right)()

    right = functools.partial(communication.dispatch, x, ids, weights)
    expect("topk_ids: expected an array of shape", lambda: communication.dispatch(x, ids[:, :2], weights), right)
    expect("hidden_states: 3 tokens, runtime_max_tokens_per_rank = 2", functools.partial(right, runtime_max_tokens_per_rank=2), right)
    expect("dispatch: 8 tokens on rank 1, max_tokens_per_rank is 7: .* larger max_tokens_per_rank|8 tokens, runtime_max",
           lambda: communication.dispatch(x[:1].repeat(8, 1), ids[:1].repeat(8, 1), weights[:1].repeat(8, 1)), right)
    expect("eplb_local_stats: must be None", functools.partial(right, eplb_local_stats=weights), right)
    with pytest.raises(ValueError, match="runtime_max_tokens_per_rank=9 must be in" if rank else "rank 1 refused"):
        right(**({"runtime_max_tokens_per_rank": 9} if rank else {}))
    right()
    rows = torch.ones((2 * MOST, HIDDEN), dtype=torch.bfloat16, device=device)
    with pytest.raises(ferry.UsageError, match="expert_output: expected" if rank else "rank 1 refused combine"):
        communication.combine(rows[:1] if rank else rows)
    right()
    assert (communication.combine(rows) == 2).all()
    with pytest.raises(ferry.UsageError, match="hidden_states: shape .* on meta, must be"):
        communication.dispatch(x.to("meta"), ids, weights)
    with pytest.raises(ferry.UsageError, match="hidden_states: a row is 18 bytes, must be a multiple of 16"):
        create_communication(bootstrap(rank, 2), MoEEpCommParams(num_experts=8, top_k=1, max_tokens_per_rank=4, hidden_size=9), "ferry")


def test_mistakes_of_one_rank(rng):
    run(check_mistakes, rng, 2, "nccl" if GPUS >= 2 else "gloo")


def test_a_layer_without_a_group():
    ferry.integrations.flashinfer.register()
    with pytest.raises(ferry.UsageError, match="torch.distributed is not initialised"):
        create_communication(bootstrap(0, 1), MoEEpCommParams(num_experts=8, top_k=1, max_tokens_per_rank=4, hidden_size=16), "ferry")


def test_a_host_without_communication_backends(monkeypatch):
    monkeypatch.delitem(sys.modules, "ferry.integrations._flashinfer_communication", raising=False)
    monkeypatch.delattr(ferry.integrations, "_flashinfer_communication", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep.core.comm.communication", None)
    with pytest.raises(ferry.UnsupportedError, match="register: needs flashinfer-python 0.7.4 or newer"):
        ferry.integrations.flashinfer.register()
