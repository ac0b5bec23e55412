# What the call of docs/guides/transformers.md stands in: one rank, a small model. needs: transformers
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from ferry import Group

whole = MixtralForCausalLM(MixtralConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                                         num_key_value_heads=1))
ids = torch.arange(8)[None]
logits = whole(ids).logits


def body(rank):
    class AutoModelForCausalLM:
        from_pretrained = staticmethod(lambda name: whole)

    name = "small"
    Group.torch = staticmethod(lambda: rank)
    # BLOCK
    assert torch.allclose(model(ids).logits, logits, atol=1e-5) and model.config._experts_implementation == "ferry"


Group.threads(1).run(body)
