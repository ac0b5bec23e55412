"""vLLM finds Ferry's plug-in, and its own classes for DeepEP run over Ferry. Needs the released vllm; tried with 0.33.0.

Stand-in on a machine without GPUs, not for those classes or the plug-ins: vLLM's PIN_MEMORY, since only a GPU's driver pins.
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
pytest.importorskip("vllm")

import torch.distributed as dist

import engine_plugins
import ferry
from torch_processes import run

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 2048, 5  # a hidden size of vLLM's list for low-latency mode


def load_plugins(named):
    os.environ["VLLM_PLUGINS"] = named
    os.environ["VLLM_DEEPEP_BUFFER_SIZE_MB"] = "16"
    from vllm.plugins import load_general_plugins

    with tempfile.TemporaryDirectory() as folder:
        engine_plugins.install(folder)
        load_general_plugins()


def scaled(rows, experts, weights, first, here):
    """The experts of a rank multiply: the weighted sum of each row's experts of `here` from `first` on."""
    mine = (experts >= first) & (experts < first + here)
    return (rows.float() * torch.where(mine, (1 + experts) * weights, 0.0).sum(1, keepdim=True)).bfloat16()


def configuration(device):
    """vLLM's, without an engine."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    return set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device=device.type)))


def check_classes(mode, rank, device, rng):
    load_plugins("ferry")
    import deep_ep
    assert deep_ep is ferry.deep_ep

    ranks = dist.get_world_size()
    here, first = EXPERTS // ranks, EXPERTS // ranks * rank
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
    from vllm.utils.import_utils import has_deep_ep

    assert has_deep_ep()
    modular_kernel.PIN_MEMORY = modular_kernel.PIN_MEMORY and torch.cuda.is_available()
    with configuration(device):
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(ranks, backend="gloo")
        if mode == "high_throughput":
            manager = all2all.DeepEPHTAll2AllManager(dist.group.WORLD)
            layer = DeepEPHTPrepareAndFinalize(manager.get_handle({}), ranks, ranks, first)
        else:
            manager = all2all.DeepEPLLAll2AllManager(dist.group.WORLD)
            layer = DeepEPLLPrepareAndFinalize(manager.get_handle({
                "max_num_tokens_per_dp_rank": TOKENS, "token_hidden_size": HIDDEN, "num_ep_ranks": ranks, "num_global_experts": EXPERTS,
                "num_local_experts": here}), TOKENS, ranks)
    rng = np.random.default_rng([rank, int(rng.integers(1 << 31))])  # each rank its own inputs
    for _ in range(3):
        x, ids, weights = engine_plugins.inputs(rng, (TOKENS, EXPERTS, TOP_K, HIDDEN), device)
        rows, _, meta, row_ids, row_weights = layer.prepare(x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
        y = torch.full_like(x, float("nan"))
        if mode == "high_throughput":
            layer.finalize(y, scaled(rows, row_ids, row_weights, first, here), row_weights, row_ids, False, TopKWeightAndReduceNoOP())
        else:
            assert rows.shape == (here, ranks * TOKENS, HIDDEN) and int(meta.expert_num_tokens.sum()) <= ranks * TOKENS * TOP_K
            outputs = (rows.float() * (1 + first + torch.arange(here, device=device))[:, None, None]).bfloat16()
            layer.finalize(y, outputs, weights, ids, False, TopKWeightAndReduceDelegate())
        torch.testing.assert_close(y, scaled(x, ids, weights, 0, EXPERTS), rtol=3e-2, atol=3e-2)
    manager.destroy()


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_the_classes_of_vllm(rng, mode):
    run(functools.partial(check_classes, mode), rng, 2, "gloo")


def check_not_named(rank, device, rng):
    load_plugins("another")
    assert "deep_ep" not in sys.modules


def check_another_deep_ep(rank, device, rng):
    sys.modules["deep_ep"] = types.ModuleType("deep_ep")
    with pytest.raises(ferry.UnsupportedError, match="another deep_ep was imported before vLLM loaded its plug-ins"):
        load_plugins("ferry")


@pytest.mark.parametrize("body", [check_not_named, check_another_deep_ep])
def test_when_the_plug_in_does_nothing(rng, body):
    run(body, rng, 1, "gloo")
