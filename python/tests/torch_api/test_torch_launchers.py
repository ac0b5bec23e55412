"""Jobs of torchrun and mpirun, with a GPU for each rank if there are enough: gradients and compiled code against a dense sum."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import ferry
from dense_check import check_dense_sum, settings_of
from torch_processes import GPUS, RANKS, run

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
BESIDE = pathlib.Path(ferry.__file__).parent / "libferry_mpi.so"


def run_job(rng, launcher, command, environment):
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([*command, str(SUPPORT / "launched_rank.py"), launcher, str(rng.integers(1 << 30))],
                          env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    device = "cuda" if GPUS else "cpu"
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert lines == [f"rank {rank} of {RANKS} on {device} right" for rank in range(RANKS)]


def test_ranks_of_torchrun(rng):
    run_job(rng, "torchrun", [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"],
            dict(os.environ))


def test_ranks_of_mpirun(rng):
    if not shutil.which("mpirun") or not (BESIDE.exists() or "FERRY_MPI_MODULE" in os.environ):
        pytest.skip("MPI is not installed, or Ferry was built without it")
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    run_job(rng, "mpirun", ["mpirun", "-n", str(RANKS), sys.executable], os.environ | settings)


def output_of(example, ranks, nodes=1):
    path = pathlib.Path(__file__).parents[3] / "examples" / f"{example}.py"
    on_its_node = f'FERRY_HOST_ID="host $((RANK * {nodes} / WORLD_SIZE))" exec "$0" "$1"'
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python",
                           "bash", "-c", on_its_node, sys.executable, str(path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_training_example():
    steps = re.findall(r"step (\d+): loss ([\d.]+), dense ([\d.]+), gradients agree", output_of("torchrun_moe", 4))
    assert [step for step, *_ in steps] == ["0", "19"]
    assert all(loss == dense for _, loss, dense in steps) and float(steps[1][1]) < float(steps[0][1])


def test_the_example_of_decode():
    how = "one CUDA graph" if GPUS else "no GPU, so no graph"
    assert re.fullmatch(rf"20 steps on 2 ranks, \d+ tokens, {how}: as a dense layer\n", output_of("serve_decode", 2))


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_example_of_deep_ep(nodes):
    assert output_of("deep_ep_swap", 2, nodes) == "".join(f"{mode} mode over ferry.deep_ep on 2 ranks: as a dense layer\n"
                                                          for mode in ("normal", "low-latency"))


def test_the_example_of_transformers():
    pytest.importorskip("transformers")
    lines = output_of("transformers_ep", 4).splitlines()
    assert lines[0] == "rank 0 of 4: 107840 of 329024 parameters"
    steps = [re.fullmatch(r"step (\d): loss ([\d.]+), in one process ([\d.]+), gradients agree", line).groups() for line in lines[1:3]]
    assert [step for step, *_ in steps] == ["0", "9"]
    assert all(abs(float(loss) - float(whole)) < 0.002 for _, loss, whole in steps) and float(steps[1][1]) < float(steps[0][1])
    assert lines[3:] == ["32 tokens generated: 4 of 4 ranks have those of one process"]


def check(compiler, rank, device, rng):
    exchange = ferry.Exchange(ferry.Group.torch(), **settings_of(RANKS, device))
    check_dense_sum(exchange, rank, RANKS, device, int(rng.integers(1 << 30)), compiler)


def can_compile():
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3, device="cuda" if GPUS else "cpu"))
    except Exception:
        return False
    return True


def test_gradients_and_compiled_code(rng):
    run(functools.partial(check, "aot_eager"), rng)


def test_code_of_inductor(rng):
    if not can_compile():
        pytest.skip("PyTorch cannot compile here")
    run(functools.partial(check, "inductor"), rng)
