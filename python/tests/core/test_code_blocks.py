"""The documents' code blocks in Python run; those that need PyTorch only where it is installed."""

import pathlib
import subprocess
import sys

import ferry

CHECK = pathlib.Path(__file__).parents[3] / "scripts" / "check_code_blocks.py"


def test_the_code_blocks_of_the_documents():
    package = pathlib.Path(ferry.__file__).parents[1]
    done = subprocess.run([sys.executable, "-B", CHECK, "--language", "python", "--package", package], capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
