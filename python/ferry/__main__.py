"""`python -m ferry` prints what this installation has. The command `ferry`, or `python -m ferry` with arguments, runs the
program, which is compiled."""

import os
import pathlib
import sys
from typing import NoReturn

import ferry
import ferry._core

# Where the compiled parts are: the sources are elsewhere in an editable installation.
PACKAGE = pathlib.Path(ferry._core.__file__).resolve().parent
PROGRAM = PACKAGE / "ferry"

# How to get what an installation lacks.
REMEDIES = {
    "GPUs": "needed for the backend cuda only: install a wheel that has it, or build it where the CUDA toolkit is, "
    "in the sources: pip install --config-settings=cmake.define.FERRY_CUDA=ON .",
    "program": "it needs CLI11, fmt and nlohmann-json when it is built (Debian: apt-get install libcli11-dev libfmt-dev "
    "nlohmann-json3-dev libopenblas-dev), then in the sources: pip install --force-reinstall --no-deps .",
    "MPI module": "needed for Group.mpi() only: install MPI (Debian: apt-get install libopenmpi-dev openmpi-bin), "
    "then in the sources: pip install --force-reinstall --no-deps .",
}


def run_program() -> NoReturn:
    if not PROGRAM.exists():
        print(f"ferry: this installation has no program; {REMEDIES['program']}", file=sys.stderr)
        sys.exit(3)
    # `ferry launch` runs scripts with the first python3 of PATH: this one, which has the package.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    os.execv(PROGRAM, ["ferry", *sys.argv[1:]])


def describe() -> str:
    module = PACKAGE / "libferry_mpi.so"
    found = {
        "GPUs": "backend cuda" if ferry.has_cuda() else "",
        "program": str(PROGRAM) if PROGRAM.exists() else "",
        "MPI module": str(module) if module.exists() else "",
    }
    lines = [f"ferry {ferry.__version__} in {PACKAGE}"]
    for part, where in found.items():
        lines.append(f"{'ok' if where else '--'}  {part:<12}{where or 'not in this installation'}")
        if not where:
            lines.append(f"{'':<16}{REMEDIES[part]}")
    return "\n".join([*lines, f"    {'documents':<12}{PACKAGE / 'documents'}"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_program()
    print(describe())
