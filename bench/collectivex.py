"""Ferry in CollectiveX, SemiAnalysis' benchmark of expert-parallel libraries: its adapter class, and a program that runs one case.

    torchrun --nproc-per-node 8 bench/collectivex.py InferenceX/experimental/CollectiveX --mode normal --precision bf16 ...

The first argument is a checkout's folder of CollectiveX; the others are those of its bench/run_ep.py, except --backend.
CollectiveX makes the inputs, checks the results against its own oracle, takes the times and writes the JSON. To run Ferry from
run_ep.py itself, put this folder on PYTHONPATH, add "ferry" to the choices of --backend, and import FerryBackend from this module.

    mode         layout        a received row is           combine
    normal       rank_major    a token, once per rank      adds ranks' rows: "partial"
    low-latency  expert_major  a token for one expert      weights rows at the token's rank and adds them: "exact"

With --precision fp8 Ferry quantises inside dispatch, in blocks of 128 columns, and stage() decodes what arrived to bf16.
"""

import argparse
import os
import sys
import types

import ferry
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, os.path.join(sys.argv.pop(1), "bench"))

from ep_backend import EPBackend

BLOCK = 128  # columns that share a scale
LARGEST, SMALLEST_AMAX = 448.0, 1e-4  # of e4m3, and of a block


def decode(values, scales):
    return (values.float().unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2).bfloat16()


class FerryBackend(EPBackend):
    name = "ferry"
    maturity = "candidate"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")
    library_version = ferry.__version__

    def __init__(self, args, rank, world_size, local_rank, device):
        super().__init__(args, rank, world_size, local_rank, device)
        self.by_expert = self.mode == "low-latency"
        self.kernel_generation = "expert-major" if self.by_expert else "rank-major"
        if self.by_expert:
            self.receive_layout, self.combine_weight_semantics = "token-expert", "weighted-kernel-sum"
        self.fp8 = self.precision == "fp8"
        self.stage_device_work = self.fp8
        if self.fp8:
            self.dispatch_dtype, self.dispatch_value_bytes = "fp8-e4m3fn", 1
            self.dispatch_scale_bytes_per_copy = args.hidden // BLOCK * 4
        self.experts_here = args.experts // world_size

    def create_buffer(self, spec):
        self.exchange = ferry.Exchange(
            ferry.Group.torch(), experts=self.args.experts, top_k=self.args.topk, hidden=self.args.hidden,
            max_tokens=spec.max_tokens_per_rank, memory="device" if self.device.type == "cuda" else "host", format=self.precision,
            layout="expert_major" if self.by_expert else "rank_major", reduction="exact" if self.by_expert else "partial",
            deadline=100.0)

    def semantic_payload(self, x):
        if not self.fp8:
            return x
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
        return decode((blocks * (LARGEST / amax)).to(torch.float8_e4m3fn).flatten(-2), amax[..., 0] / LARGEST)

    def dispatch(self, problem):
        rows = self.exchange.dispatch(problem.dispatch_x, problem.topk_idx, None if self.by_expert else problem.topk_weights)
        return types.SimpleNamespace(rows=rows)

    def stage(self, problem, handle):
        handle.combine_input = self.received(handle, problem.recv_tokens) if self.fp8 else handle.rows.data

    def combine(self, problem, handle):
        weights = problem.topk_weights if self.by_expert else None
        return self.exchange.combine(handle.combine_input, handle.rows.plan, topk_weights=weights)

    def recv_tokens(self, handle):
        return int(handle.rows.total)

    def inspect_dispatch(self, problem, handle):
        rows, count = handle.rows, self.recv_tokens(handle)
        first = self.rank * self.experts_here
        payload = self.received(handle, count)
        if self.by_expert:
            local = torch.arange(self.experts_here, device=payload.device).repeat_interleave(rows.counts.long())
            return types.SimpleNamespace(payload=payload, expert_ids=first + local, local_expert_counts=rows.counts)
        local = rows.local_ids[:count].long()
        valid = local >= 0
        return types.SimpleNamespace(
            payload=payload, expert_ids=torch.where(valid, local + first, -1), weights=rows.weight[:count].masked_fill(~valid, 0),
            local_expert_counts=torch.bincount(local[valid], minlength=self.experts_here))

    def combine_transformed(self, problem, handle, transformed):
        handle.combine_input = transformed.contiguous()
        return self.combine(problem, handle)

    def finalize(self, rc):
        dist.barrier()
        self.exchange.destroy()
        dist.destroy_process_group()
        return rc

    def received(self, handle, count):
        """The first `count` rows in bf16. Rows lie without gaps in both layouts."""
        rows = handle.rows
        return decode(rows.data[:count], rows.scales[:count]) if self.fp8 else rows.data[:count]


def run_case():
    """Runs one case as run_ep.py does; returns its exit status."""
    import ep_harness

    parser = argparse.ArgumentParser(description="one CollectiveX case with Ferry")
    ep_harness.add_common_args(parser)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    args.runtime_device_product = torch.cuda.get_device_name(device)
    args.runtime = {"accelerator_runtime": torch.version.cuda, "framework": torch.__version__, "vendor": "nvidia"}
    backend = FerryBackend(args, dist.get_rank(), dist.get_world_size(), local_rank, device)
    return backend.finalize(ep_harness.run_sweep(args, backend, torch, dist, device, backend.rank, backend.world_size))


if __name__ == "__main__":
    sys.exit(run_case())
