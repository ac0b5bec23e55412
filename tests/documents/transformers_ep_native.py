# What the call of docs/guides/transformers.md that loads in shards stands in: one rank, so nothing is sharded. needs: accelerate
import tempfile

import torch
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

whole = MixtralForCausalLM(MixtralConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                                         num_key_value_heads=1))
ranks = 1
with tempfile.TemporaryDirectory() as name:
    whole.save_pretrained(name)
    # BLOCK
    assert "ferry" in EPImplementationInterface()
    assert torch.equal(model(torch.arange(8)[None]).logits, whole(torch.arange(8)[None]).logits)
