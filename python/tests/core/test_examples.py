"""The examples print what they say."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(("name", "expected"), [("first", "first"), ("bootstrap", "first"), ("nvfuser", "nvfuser"), ("max", "max"),
                                                ("grouped_gemm", "grouped_gemm"), ("programs", "programs"),
                                                ("megatron_inference", "megatron_inference")])
def test_example(name, expected):
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ((EXAMPLES / f"{expected}.txt").read_text(), 0), done.stderr
