# Spreads the experts of a small Mixtral of Hugging Face transformers over processes, trains it and generates text, and compares
# each step with the same model in one process:
#   torchrun --nproc-per-node=4 examples/transformers_ep.py
import copy

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import ferry
from ferry.integrations.transformers import distribute_experts, expert_parameters

SEQUENCES, LENGTH, STEPS, NEW_TOKENS = 2, 16, 10, 32


def loss_of(model, batch):
    """The mean over the tokens of all ranks: each rank adds its share."""
    return model(batch, labels=batch).loss * len(batch) / (SEQUENCES * dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # All ranks draw the same weights and the same batch; each keeps its experts and its sequences.
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, num_local_experts=8, initializer_range=0.1, eos_token_id=None)
    model = MixtralForCausalLM(config).train()
    whole = copy.deepcopy(model)  # for comparison only
    batch = torch.randint(64, (SEQUENCES * ranks, LENGTH))
    mine = batch[SEQUENCES * rank : SEQUENCES * (rank + 1)]

    distribute_experts(model, ferry.Group.torch(), max_tokens=SEQUENCES * LENGTH)
    experts = expert_parameters(model)
    if rank == 0:
        held, total = (sum(each.numel() for each in kept.parameters()) for kept in (model, whole))
        print(f"rank 0 of {ranks}: {held} of {total} parameters")

    optimizer, whole_optimizer = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, whole))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, mine)
        loss.backward()
        for name, weight in model.named_parameters():
            if name not in experts:  # replicated: every rank has the gradient of its own tokens
                dist.all_reduce(weight.grad)

        whole_optimizer.zero_grad()
        whole_loss = loss_of(whole, batch)
        whole_loss.backward()
        for name, weight in model.named_parameters():
            expected = whole.get_parameter(name).grad
            if name in experts:
                expected = expected.chunk(ranks)[rank]
            torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-5)

        optimizer.step()
        whole_optimizer.step()
        dist.all_reduce(loss)
        if rank == 0 and step in (0, STEPS - 1):
            print(f"step {step}: loss {loss.item():.3f}, in one process {whole_loss.item():.3f}, gradients agree")

    prompt = mine[:, :8]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    generated = model.eval().generate(prompt, synced_gpus=ranks > 1, **settings)  # ranks that are done go on calling
    same = torch.tensor(torch.equal(generated, whole.eval().generate(prompt, **settings)), dtype=torch.int32)
    dist.all_reduce(same)
    if rank == 0:
        print(f"{NEW_TOKENS} tokens generated: {same.item()} of {ranks} ranks have those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
