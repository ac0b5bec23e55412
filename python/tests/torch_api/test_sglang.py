"""SGLang finds Ferry's plug-in, and its own dispatchers for DeepEP run over Ferry. Needs the released sglang; tried with 0.5.23.

Stand-ins on a machine without GPUs, none of them for the dispatchers or the plug-ins:
  torch.cuda.get_device_properties   says how many SMs a GPU has, for a warning
  ENABLE_JIT_DEEPGEMM                says that sgl-deep-gemm is there, without which the dispatcher refuses to combine
  deep_ep                            a module of empty classes, where a test wants one that was imported before Ferry's
"""

import functools
import os
import sys
import tempfile
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tomllib")
pytest.importorskip("sglang")

import torch.distributed as dist

import engine_plugins
import ferry
from torch_processes import run

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 256, 5
DISPATCHER = "sglang.srt.layers.moe.token_dispatcher.deepep"


def load_plugins(named, other_deep_ep):
    """SGLang's loading of plug-ins; with `other_deep_ep` after the dispatcher has been imported, as in its workers."""
    os.environ["SGLANG_PLUGINS"] = named
    if other_deep_ep:
        sys.modules["deep_ep"] = other = types.ModuleType("deep_ep")
        other.Buffer, other.Config, other.ElasticBuffer = (type(name, (), {}) for name in ("Buffer", "Config", "ElasticBuffer"))
        __import__(DISPATCHER)
    from sglang.srt.plugins import load_plugins

    with tempfile.TemporaryDirectory() as folder:
        engine_plugins.install(folder)
        load_plugins()


def scaled(rows, experts, weights):
    """Experts that multiply: the weighted sum of each row's experts, -1 being none."""
    factors = torch.where(experts >= 0, (1 + experts) * weights, 0.0).sum(1, keepdim=True)
    return (rows.float() * factors).bfloat16()


def check_dispatcher(mode, other_deep_ep, rank, device, rng):
    load_plugins("another, ferry", other_deep_ep)
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device=device.type, deepep_dispatcher_output_dtype="bf16"))
    assert deepep.Buffer is ferry.deep_ep.Buffer and deepep.Config is ferry.deep_ep.Config and deepep.use_deepep
    if not torch.cuda.is_available():
        deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
        torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
    ranks = dist.get_world_size()
    here = EXPERTS // ranks
    dispatcher = deepep.DeepEPDispatcher(
        group=dist.group.WORLD, router_topk=TOP_K, permute_fusion=True, num_experts=EXPERTS, num_local_experts=here,
        hidden_size=HIDDEN, params_dtype=torch.bfloat16, deepep_mode=DeepEPMode(mode), async_finish=True, return_recv_hook=True)
    rng = np.random.default_rng([rank, int(rng.integers(1 << 31))])  # each rank its own inputs
    for _ in range(3):
        x, ids, weights = engine_plugins.inputs(rng, (TOKENS, EXPERTS, TOP_K, HIDDEN), device)
        received = dispatcher.dispatch(x, StandardTopKOutput(weights, ids, None))
        if mode == "normal":
            local = received.topk_ids
            experts = torch.where(local >= 0, local + rank * here, -1)
            output = deepep.DeepEPNormalCombineInput(scaled(received.hidden_states, experts, received.topk_weights), local,
                                                     received.topk_weights)
        else:
            experts = torch.arange(rank * here, (rank + 1) * here, device=device)
            rows = (received.hidden_states.float() * (1 + experts)[:, None, None]).bfloat16()
            output = deepep.DeepEPLLCombineInput(rows, ids, weights)
        torch.testing.assert_close(dispatcher.combine(output), scaled(x, ids, weights), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("other_deep_ep", [False, True])
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_the_dispatcher_of_sglang(rng, mode, other_deep_ep):
    run(functools.partial(check_dispatcher, mode, other_deep_ep), rng, 2, "gloo")


def check_dispatcher_v2(rank, device, rng):
    load_plugins("ferry", True)
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_forward
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device=device.type))
    assert deepep_v2.ElasticBuffer is ferry.deep_ep.ElasticBuffer
    here = EXPERTS // dist.get_world_size()
    dispatcher = deepep_v2.DeepEPv2Dispatcher(
        group=dist.group.WORLD, router_topk=TOP_K, num_experts=EXPERTS, num_local_experts=here, hidden_size=HIDDEN,
        params_dtype=torch.bfloat16, use_fp8_dispatch=False)
    rng = np.random.default_rng([rank, int(rng.integers(1 << 31))])  # each rank its own inputs
    for prefill in (True, False):
        get_forward().set("is_extend_in_batch", prefill)
        x, ids, weights = engine_plugins.inputs(rng, (TOKENS, EXPERTS, TOP_K, HIDDEN), device)
        received = dispatcher.dispatch(x, StandardTopKOutput(weights, ids, None))
        assert received.is_expanded and received.use_masked_gemm != prefill
        row = torch.arange(len(received.hidden_states), device=device)
        expert = rank * here + torch.searchsorted(received.psum_num_recv_tokens_per_expert.long(), row, right=True)
        output = scaled(received.hidden_states, expert[:, None], received.topk_weights[:, None])
        y = dispatcher.combine(deepep_v2.DeepEPv2CombineInput(output, None))
        torch.testing.assert_close(y, scaled(x, ids, weights), rtol=3e-2, atol=3e-2)


def test_the_dispatcher_of_sglang_for_deep_ep_v2(rng):
    run(check_dispatcher_v2, rng, 2, "gloo")


def check_not_named(rank, device, rng):
    load_plugins("another", True)
    assert sys.modules[DISPATCHER].Buffer is sys.modules["deep_ep"].Buffer is not ferry.deep_ep.Buffer


def check_without_deep_ep(rank, device, rng):
    sys.modules["deep_ep"] = None
    __import__(DISPATCHER)
    os.environ["SGLANG_PLUGINS"] = "ferry"
    import ferry.integrations.sglang

    with pytest.raises(ferry.UnsupportedError, match="deepep was imported without a deep_ep: install sgl-deep-ep"):
        ferry.integrations.sglang.register()


@pytest.mark.parametrize("body", [check_not_named, check_without_deep_ep])
def test_when_the_plug_in_does_nothing(rng, body):
    run(body, rng, 1, "gloo")
