# What the layer of docs/guides/flashinfer.md stands in: one rank, experts that return their rows. needs: flashinfer
import torch
import torch.distributed as dist
from flashinfer.moe_ep import BootstrapConfig, IdentityConfig, MoEEpTensors, MoEWeightPack

E, T, H = 4, 3, 16
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
bootstrap, kernel = BootstrapConfig(world_size=1, rank=0, stream=0), IdentityConfig()
weights = MoEWeightPack(torch.zeros(E, 2 * H, H), torch.zeros(E, H, H))
# BLOCK

x = torch.randn(T, H).bfloat16()
assert torch.equal(layer(MoEEpTensors(x, torch.arange(2 * T).reshape(T, 2) % E, torch.ones(T, 2))), x)
dist.destroy_process_group()
