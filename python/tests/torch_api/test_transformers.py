"""Models of Hugging Face transformers with their experts spread over ranks, compared with the same model in one process."""

import functools
import importlib.util
import pickle
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist

import ferry
from ferry.integrations.transformers import distribute_experts, expert_parameters, register
from tiny_transformers import CONFIGURATIONS, EXPERTS, VOCABULARY, copy_of, gradients_in_one_process, loss_of, make_model, sequences
from torch_processes import GPUS, run

NEW_TOKENS, MOST = 32, 64
NAMED = ["Mixtral", "Qwen3-MoE", "OLMoE", "DeepSeek-V3"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def close(got, expected, what, tolerance=1e-4):
    """Within `tolerance` of the largest expected value."""
    scale = expected.abs().max().item()
    error = (got.float().cpu() - expected.float().cpu()).abs().max().item() if expected.numel() else 0.0
    assert got.shape == expected.shape and error <= tolerance * scale, f"{what}: off by {error}, the largest value is {scale}"


def slice_of(rank, ranks, experts=EXPERTS):
    mine = ferry.Placement.blocks(experts, ranks).experts_of(rank)
    return slice(mine[0], mine[-1] + 1) if mine else slice(0, 0)


def check_gradients(model, rank, ranks, expected, sum_over_ranks):
    spread = expert_parameters(model)
    for name, weight in model.named_parameters():
        if name in spread:
            close(weight.grad, expected[name][slice_of(rank, ranks)], f"gradient of {name}")
        else:
            close(sum_over_ranks(weight.grad), expected[name], f"gradient of {name}")


def summed(gradient):
    dist.all_reduce(gradient)
    return gradient


def check_models(rank, device, rng):
    ranks = dist.get_world_size()
    for name in NAMED:
        whole = make_model(name, int(rng.integers(1 << 30))).to(device)
        batches = [ids.to(device) for ids in sequences(rng, ranks)]
        model = copy_of(whole)
        distribute_experts(model, ferry.Group.torch(), max_tokens=MOST)
        held = expert_parameters(model)
        layers = len(held) // 2
        assert layers == (1 if name == "DeepSeek-V3" else 2)
        for key, weight in held.items():
            assert torch.equal(weight, whole.get_parameter(key)[slice_of(rank, ranks)]), key
        with torch.no_grad():
            close(model(batches[rank]).logits, whole(batches[rank]).logits, f"logits of {name}")

        expected = gradients_in_one_process(whole, batches)
        loss_of(model, batches[rank], sum(ids[:, 1:].numel() for ids in batches)).backward()
        check_gradients(model, rank, ranks, expected, summed)

        settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS - 7 * rank}  # some ranks end earlier
        got = model.generate(batches[rank], synced_gpus=True, **settings)
        assert got.shape[1] == batches[rank].shape[1] + settings["max_new_tokens"]
        assert torch.equal(got, whole.generate(batches[rank], **settings)), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_models_agree_with_one_process(rng, ranks):
    run(check_models, rng, ranks, "nccl" if GPUS >= ranks else "gloo")


def check_recomputed_layers(rank, device, rng):
    """Gradient checkpointing runs the layers again in the backward pass, with frozen routers too."""
    ranks = dist.get_world_size()
    whole = make_model("Qwen3-MoE", int(rng.integers(1 << 30))).to(device)
    for name, weight in whole.named_parameters():
        weight.requires_grad_(not name.endswith("gate.weight"))
    batches = [ids.to(device) for ids in sequences(rng, ranks)]
    model = copy_of(whole)
    distribute_experts(model, ferry.Group.torch(), max_tokens=MOST)
    expected = {name: gradient for name, gradient in gradients_in_one_process(whole, batches).items() if gradient is not None}
    model.gradient_checkpointing_enable()
    model.train()
    for _ in range(2):  # the second time over gradients that are there
        model.zero_grad()
        loss_of(model, batches[rank], sum(ids[:, 1:].numel() for ids in batches)).backward()
    spread = expert_parameters(model)
    for name, weight in model.named_parameters():
        if name in expected:
            gradient = weight.grad if name in spread else summed(weight.grad)
            close(gradient, expected[name][slice_of(rank, ranks)] if name in spread else expected[name], f"gradient of {name}")
        else:
            assert weight.grad is None


def test_recomputed_layers(rng):
    run(check_recomputed_layers, rng, 2, "nccl" if GPUS >= 2 else "gloo")


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
def test_experts_of_every_implementation(rng, name, implementation):
    whole = make_model(name, int(rng.integers(1 << 30)))
    whole.set_experts_implementation(implementation)
    batches = sequences(rng, 3)
    with torch.no_grad():
        expected = [whole(ids).logits for ids in batches]

    def body(rank):
        model = copy_of(whole)
        distribute_experts(model, rank, max_tokens=MOST)
        with torch.no_grad():
            close(model(batches[rank.index]).logits, expected[rank.index], f"logits of {name}")

    ferry.Group.threads(3).run(body)


@pytest.mark.parametrize("experts", [6, 3])
def test_experts_that_ranks_hold_in_different_numbers(rng, experts):
    """With 3 experts on 4 ranks one rank holds none."""
    whole = make_model("Mixtral", int(rng.integers(1 << 30)), num_local_experts=experts)
    batches = sequences(rng, 4)
    expected = gradients_in_one_process(whole, batches)
    with torch.no_grad():
        logits = [whole(ids).logits for ids in batches]
    total = sum(ids[:, 1:].numel() for ids in batches)

    def body(rank):
        model = copy_of(whole)
        distribute_experts(model, rank, max_tokens=MOST)
        close(model(batches[rank.index]).logits.detach(), logits[rank.index], "logits")
        loss_of(model, batches[rank.index], total).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}, set(expert_parameters(model))

    results = ferry.Group.threads(4).run(body)
    for name, gradient in expected.items():
        parts = [gradients[name] for gradients, _ in results]
        if name in results[0][1]:
            held = [slice_of(rank, 4, experts) for rank in range(4)]
            for rank, (part, mine) in enumerate(zip(parts, held)):
                if mine.stop > mine.start:
                    close(part, gradient[mine], f"gradient of {name} on rank {rank}")
        else:
            close(sum(parts), gradient, f"gradient of {name}")


def test_experts_without_tokens(rng):
    """Rank 1 passes no tokens, and all tokens of rank 0 go to experts of rank 0. Both take part in every call."""
    whole = make_model("OLMoE", int(rng.integers(1 << 30)))
    x = torch.tensor(rng.standard_normal((7, 32)), dtype=torch.float32)
    weights = torch.rand(7, 2)

    def body(rank):
        model = copy_of(whole)
        distribute_experts(model, rank, max_tokens=7)
        layer, tokens = model.model.layers[0].mlp.experts, 0 if rank.index else 7
        given = x[:tokens].clone().requires_grad_()
        y = layer(given, torch.tensor([[0, 3]] * 7)[:tokens], weights[:tokens].clone())
        y.square().sum().backward()
        return y.detach(), given.grad, layer.down_proj.grad

    (y, dx, ours), (empty, empty_dx, theirs) = ferry.Group.threads(2).run(body)
    layer, given = whole.model.layers[0].mlp.experts, x.clone().requires_grad_()
    expected = layer(given, torch.tensor([[0, 3]] * 7), weights)
    expected.square().sum().backward()
    close(y, expected.detach(), "y")
    close(dx, given.grad, "gradient of x")
    close(ours, layer.down_proj.grad[:4], "gradient of down_proj")
    assert empty.shape == empty_dx.shape == (0, 32) and not theirs.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_activations(rng, dtype):
    """As far from the layer in fp32 as its own rounding: results of experts and their sum."""
    whole = make_model("OLMoE", int(rng.integers(1 << 30))).to(dtype)
    exact = copy_of(whole).float().model.layers[0].mlp.experts
    x = torch.tensor(rng.standard_normal((12, 32))).to(dtype)
    ids = torch.tensor(np.stack([rng.permutation(EXPERTS)[:3] for _ in range(12)]))
    weights = torch.rand(12, 3).softmax(-1).to(dtype)
    with torch.no_grad():
        expected = exact(x.float(), ids, weights.float())

    def body(rank):
        model = copy_of(whole)
        distribute_experts(model, rank, max_tokens=12)
        with torch.no_grad():
            y = model.model.layers[0].mlp.experts(x, ids, weights)
        assert y.dtype == dtype
        close(y, expected, "y", 2e-2 if dtype == torch.bfloat16 else 3e-3)

    ferry.Group.threads(2).run(body)


def test_a_copy_shares_the_exchanges(rng):
    whole = make_model("Mixtral", int(rng.integers(1 << 30)))
    ids = sequences(rng, 1)[0]

    def body(rank):
        model = copy_of(whole)
        distribute_experts(model, rank, max_tokens=MOST)
        copied = copy_of(model)
        with torch.no_grad():
            assert torch.equal(copied(ids).logits, model(ids).logits)
        with pytest.raises(TypeError, match="belongs to its process"):
            pickle.dumps(model)

    ferry.Group.threads(2).run(body)


def test_weights_that_are_loaded_after_the_call(rng):
    """A model on 'meta' gets room for this rank's experts only."""
    whole = make_model("Qwen3-MoE", int(rng.integers(1 << 30)))
    ids = sequences(rng, 1)[0]
    with torch.no_grad():
        expected = whole(ids).logits

    def body(rank):
        model = copy_of(whole).to("meta")
        distribute_experts(model, rank, max_tokens=MOST)
        mine = slice_of(rank.index, 2)
        state = {key: value[mine] if key in expert_parameters(model) else value for key, value in whole.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = copy_of(whole.model.rotary_emb)  # not in a state_dict
        with torch.no_grad():
            close(model(ids).logits, expected, "logits")

    ferry.Group.threads(2).run(body)


NATIVE = importlib.util.find_spec("transformers.distributed.expert_parallel") is not None
native = pytest.mark.skipif(not NATIVE, reason="this version of transformers has no table of expert-parallel implementations")


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_native(folder, names, layouts, rank, device, rng):
    """Layouts of transformers' own expert parallelism, with its all-to-all beside Ferry's."""
    from transformers.distributed import DistributedConfig

    seed = int(rng.integers(1 << 30))
    register(max_tokens=MOST)
    for name in names:
        whole = make_model(name, seed).to(device)
        saved = f"{folder}/{name}"
        if rank == 0:
            whole.save_pretrained(saved)
        dist.barrier()
        for layout in layouts:
            batches = dist.get_world_size() // layout.get("tp_size", 1)  # the ranks of a tensor-parallel group share one
            mine = sequences(rng, batches)[rank * batches // dist.get_world_size()].to(device)
            gradients = []
            for implementation in ("ferry", "all_to_all"):
                config = DistributedConfig(ep_implementation=implementation, **layout)
                model = transformers.AutoModelForCausalLM.from_pretrained(saved, distributed_config=config)
                held = [weight.to_local() for key, weight in model.named_parameters() if key.endswith("down_proj")]
                assert all(len(weight) == EXPERTS // dist.get_world_size() for weight in held if weight.ndim == 3)
                close(full(model(mine).logits.detach()), whole(mine).logits.detach(), f"logits of {name}, {layout}")
                loss_of(model, mine, 10).backward()
                gradients.append({key: full(weight.grad) for key, weight in model.named_parameters()})
                if implementation == "ferry":
                    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
                    assert torch.equal(model.generate(mine, synced_gpus=True, **settings), whole.generate(mine, **settings))
                    model.save_pretrained(f"{saved} again")
                    again = transformers.AutoModelForCausalLM.from_pretrained(f"{saved} again").state_dict()
                    assert all(torch.equal(again[key], value.cpu()) for key, value in whole.state_dict().items())
            assert any(gradient.any() for key, gradient in gradients[0].items() if key.endswith("experts.gate_up_proj"))
            for key, gradient in gradients[1].items():
                close(gradients[0][key], gradient, f"gradient of {key} of {name}, {layout}")


@native
@pytest.mark.parametrize("ranks, names, layouts", [
    (2, ["Mixtral", "DeepSeek-V3"], [{"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}]),
    (4, ["OLMoE"], [{"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, {"fsdp_size": 4, "ep_size": 2}]),
])
def test_models_that_transformers_shards(rng, tmp_path, ranks, names, layouts):
    pytest.importorskip("accelerate")
    run(functools.partial(check_native, str(tmp_path), names, layouts), rng, ranks, "nccl" if GPUS >= ranks else "gloo")


def small(name="Mixtral"):
    return make_model(name, 1)


def refused(call, match, error=ferry.UsageError):
    with pytest.raises(error, match=match):
        call()


def test_bad_arguments_of_one_rank_end_the_call_on_all_ranks(rng):
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1))
    cases = [
        (lambda: dense, {}, "model: LlamaForCausalLM has no experts that run the functions in transformers' table"),
        (lambda: torch.nn.Linear(2, 2), {}, "model: a Linear, must be a PreTrainedModel of transformers"),
        (lambda: small().double(), {}, "hidden_states: torch.float64 is not one of torch.bfloat16, torch.float16, torch.float32"),
        (small, {"max_tokens": 0}, "max_tokens = 0, must be 1 to"),
        (small, {"max_tokens": None}, "max_tokens"),
        (small, {"max_tokens": 8, "capacity": -1}, "capacity = -1, must be 0 to"),
    ]

    def body(rank):
        for make, settings, match in cases:
            given = {"max_tokens": 8} | settings if rank.index else {"max_tokens": 8}
            model = make() if rank.index else small()
            refused(lambda: distribute_experts(model, rank, **given),
                    match if rank.index else f"rank 1 refused distribute_experts: .*{match}")
            if rank.index == 0:  # nothing has changed
                assert not expert_parameters(model) and model.config._experts_implementation == "grouped_mm"
        mixed = small("OLMoE" if rank.index else "Mixtral")
        refused(lambda: distribute_experts(mixed, rank, max_tokens=8),
                "ranks differ: MixtralForCausalLM with 2 layers .* on rank 0 and OlmoeForCausalLM with .* on rank 1: pass the same")
        refused(lambda: distribute_experts(small(), rank, max_tokens=8 + rank.index),
                "max_tokens = 8 on rank 0 and max_tokens = 9 on rank 1")

    ferry.Group.threads(2).run(body)


def test_models_that_cannot_be_spread(rng):
    rank = ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join()
    spread = small()
    distribute_experts(spread, rank, max_tokens=8)
    refused(lambda: distribute_experts(spread, rank, max_tokens=8), "experts of model.layers.0.mlp.experts are already spread over ranks")
    sharded = small()
    sharded.model.layers[1].mlp.experts._is_expert_parallel = True  # as transformers does where it shards them itself
    refused(lambda: distribute_experts(sharded, rank, max_tokens=8), "transformers has already sharded the experts of model.layers.1")
    cut = small()
    experts = cut.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:4])
    refused(lambda: distribute_experts(cut, rank, max_tokens=8), "gate_up_proj has 4 experts, and num_experts is 8")
    quantised = small()
    experts = quantised.model.layers[0].mlp.experts
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.ones(8))
    refused(lambda: distribute_experts(quantised, rank, max_tokens=8), "weights .* and down_proj_scale_inv: only .* can be spread",
            ferry.UnsupportedError)
    refused(lambda: distribute_experts(small(), None, max_tokens=8), "group: a NoneType, must be a ferry.Group or ferry.Rank")


def test_calls_that_a_spread_model_refuses(rng):
    ids = torch.tensor(rng.integers(2, VOCABULARY, (1, 9)))
    whole = small()

    def body(rank):
        model = copy_of(whole)
        distribute_experts(model, rank, max_tokens=8)
        mine = ids if rank.index else ids[:, :5]
        refused(lambda: model(mine),
                "experts: 9 tokens on rank 1, max_tokens is 8: .* pass a larger max_tokens to distribute_experts or register"
                if rank.index else "rank 1 refused experts 1: .*9 tokens")
        close(model(ids[:, :8]).logits.detach(), whole(ids[:, :8]).logits.detach(), "logits")  # the exchange stays usable

    ferry.Group.threads(2).run(body)
    alone = small()
    distribute_experts(alone, ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None), max_tokens=8)
    experts = alone.to("meta").model.layers[0].mlp.experts
    given = torch.zeros(5, 32), torch.zeros((5, 2), dtype=torch.int64), torch.zeros(5, 2)
    refused(lambda: experts(*(each.to("meta") for each in given)), "hidden_states: a tensor on meta, must be on cpu or cuda")
    other = small()
    other.config._experts_implementation = "ferry"
    refused(lambda: other(ids), "experts_implementation 'ferry': the experts of this MixtralExperts are not spread over ranks")


@native
def test_settings_of_register():
    refused(lambda: register(max_tokens=0), "max_tokens = 0, must be 1 to")
    refused(lambda: register(max_tokens=8, capacity=-1), "capacity = -1, must be 0 to")


def test_a_host_without_the_tables(monkeypatch):
    """Modules of the host that cannot be imported, as in transformers 4."""
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    refused(lambda: register(max_tokens=8), "register: needs transformers 5.24 or newer", ferry.UnsupportedError)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    refused(lambda: distribute_experts(None, None, max_tokens=8), "needs transformers 5.0 or newer", ferry.UnsupportedError)
