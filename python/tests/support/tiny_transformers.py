"""Small Mixture-of-Experts models of Hugging Face transformers with random weights, and their results in one process."""

import copy

import torch
import transformers

VOCABULARY, EXPERTS = 96, 8
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": None}
_ROUTED = {"num_experts": EXPERTS, "num_experts_per_tok": 3}
_ROPE = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

CONFIGURATIONS = {
    "Mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3MoeConfig", _ROUTED | {"moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}),
    "OLMoE": ("OlmoeConfig", _ROUTED),
    "DeepSeek-V3": ("DeepseekV3Config", _ROPE | {
        "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1}),
    # Experts with biases, transposed weights and interleaved gates.
    "GPT-OSS": ("GptOssConfig", {"num_local_experts": EXPERTS, "num_experts_per_tok": 3, "head_dim": 8}),
}


def make_model(name, seed, **settings):
    """The same weights wherever the seed is the same. Values and routes differ much between tokens."""
    kind, given = CONFIGURATIONS[name]
    config = getattr(transformers, kind)(**(_SIZES | given | settings))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def copy_of(model):
    """Shares nothing with it, its configuration included."""
    return copy.deepcopy(model)


def sequences(rng, ranks):
    """Token ids of each rank, in batches of different sizes."""
    return [torch.tensor(rng.integers(2, VOCABULARY, (1 + rank % 3, 5 + rank))) for rank in range(ranks)]


def loss_of(model, ids, total):
    """A share of the mean over `total` predicted tokens."""
    logits = model(ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / total


def gradients_in_one_process(model, batches):
    """Of the mean loss over the tokens of all batches; by parameter."""
    total = sum(ids[:, 1:].numel() for ids in batches)
    model.zero_grad()
    sum(loss_of(model, ids, total) for ids in batches).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}
