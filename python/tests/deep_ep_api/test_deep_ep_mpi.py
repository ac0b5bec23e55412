"""deep_ep between simulated nodes in an MPI job: Ferry's own group, and a communicator of mpi4py."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import ferry

BESIDE = pathlib.Path(ferry.__file__).parent / "libferry_mpi.so"
SUPPORT = pathlib.Path(__file__).parent.parent / "support"


@pytest.mark.parametrize("kind", ["ferry", "mpi4py"])
def test_all_calls_between_nodes(rng, kind):
    if not shutil.which("mpirun"):
        pytest.skip("MPI is not installed")
    if kind == "ferry" and not (BESIDE.exists() or "FERRY_MPI_MODULE" in os.environ):
        pytest.skip("Ferry was built without MPI")
    if kind == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "FERRY_MPI_MODULE" or not BESIDE.exists()}
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
                "PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(["mpirun", "-n", "4", sys.executable, SUPPORT / "internode_mpi_rank.py", kind, str(rng.integers(1 << 31))],
                          env=environment | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank {rank} of 4" for rank in range(4)]
