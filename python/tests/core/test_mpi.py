"""Ranks of an MPI job, if MPI and Ferry's MPI module are installed."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import ferry

BODY = """
import sys
import numpy as np, ferry
group = ferry.Group.mpi()
exchange = ferry.Exchange(group, experts=4, top_k=1, hidden=4, max_tokens=2, format="fp32", combine_type="fp32",
                          backend=sys.argv[1], engine="mpi")
x = np.full((2, 4), exchange.rank + 1, np.float32)
rows = exchange.dispatch(x, np.array([[0], [3]]), np.ones((2, 1), np.float32))
y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
line = f"rank {exchange.rank} of {exchange.ranks} total {int(rows.total)} right {bool((y == x).all())}"
lines = group.join().all_gather(line.encode())  # rank 0 prints all, so that lines are not mixed
if exchange.rank == 0:
    print(*(line.decode() for line in lines), sep="\\n", flush=True)
"""


BESIDE = pathlib.Path(ferry.__file__).parent / "libferry_mpi.so"


@pytest.mark.parametrize("backend", ["cpu", "collective"])
def test_ranks_of_a_job(backend):
    if not shutil.which("mpirun") or not (BESIDE.exists() or "FERRY_MPI_MODULE" in os.environ):
        pytest.skip("MPI is not installed, or Ferry was built without it")
    environment = {name: value for name, value in os.environ.items() if name != "FERRY_MPI_MODULE" or not BESIDE.exists()}
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    done = subprocess.run(["mpirun", "-n", "2", sys.executable, "-c", BODY, backend], env=environment | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank {r} of 2 total 2 right True" for r in range(2)]


def test_a_missing_mpi_module(monkeypatch):
    monkeypatch.setenv("FERRY_MPI_MODULE", "/nowhere/libferry_mpi.so")
    with pytest.raises(ferry.UnsupportedError, match="MPI module"):
        ferry.Group.mpi()
