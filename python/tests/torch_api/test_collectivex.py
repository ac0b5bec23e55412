"""bench/collectivex.py under CollectiveX's own oracle, on CPU ranks; COLLECTIVEX names a checkout's folder of CollectiveX."""

import functools
import os
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from torch_processes import run

FOLDER = os.environ.get("COLLECTIVEX")
if not FOLDER:
    pytest.skip("COLLECTIVEX does not name a checkout's folder of CollectiveX", allow_module_level=True)

EXPERTS, TOP_K, HIDDEN = 16, 4, 256


def check_case(mode, precision, rank, device, rng):
    bench = pathlib.Path(__file__).parents[3] / "bench"
    sys.path[:0] = [str(bench), f"{FOLDER}/bench"]
    torch.cuda.synchronize = lambda *_: None  # the benchmark is for GPUs; the oracle's other calls are device-neutral
    import ep_harness
    import routing
    from collectivex import FerryBackend

    args = types.SimpleNamespace(mode=mode, precision=precision, phase="decode", tokens_ladder="1 3 16", hidden=HIDDEN, topk=TOP_K,
                                 experts=EXPERTS, routing="uniform", seed=int(rng.integers(1 << 20)))
    ranks = dist.get_world_size()
    backend = FerryBackend(args, rank, ranks, rank, torch.device("cpu"))
    assert (backend.receive_layout, backend.combine_weight_semantics) in ep_harness.ORACLE_MODELED_CONTRACTS
    assert backend.combine_weight_semantics in ep_harness.MODE_ALLOWED_SEMANTICS[mode]
    spec = backend.make_inputs(args)
    backend.create_buffer(spec)
    for tokens in spec.ladder:
        point = spec.points[tokens]
        problem = backend.make_problem(tokens, point.topk_idx, point.topk_weights, point.activations)
        backend.warm(problem, 2)
        again = backend.run_roundtrip(problem)
        assert torch.equal(again, backend.run_roundtrip(problem))
        report = ep_harness._run_expert_oracle(torch, routing, backend, problem, point.global_idx, point.global_weights, rank,
                                               EXPERTS // ranks, ranks, args.seed)
        assert report["passed"], report
    backend.exchange.destroy()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_a_case_passes_the_oracle(rng, mode, precision):
    run(functools.partial(check_case, mode, precision), rng, 4, "gloo")
