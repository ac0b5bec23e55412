"""The committed type stub is what the module says of itself."""

import pathlib
import re
import subprocess
import sys

import pytest

import ferry

REPOSITORY = pathlib.Path(__file__).parents[2]


def pinned_version():
    return re.search(r"nanobind==(\S+)", (REPOSITORY / "scripts/packages.txt").read_text())[1]


def test_the_stub_is_up_to_date(tmp_path):
    nanobind = pytest.importorskip("nanobind")
    if nanobind.__version__ != pinned_version():
        pytest.skip(f"stubs are made by nanobind {pinned_version()}, this is {nanobind.__version__}")
    made = tmp_path / "_core.pyi"
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "ferry._core", "-o", made], check=True)
    committed = REPOSITORY / "python/ferry/_core.pyi"
    assert made.read_text() == committed.read_text(), "make it again: scripts/python_stub"


def test_everything_public_is_documented():
    for name in ferry.__all__:
        item = getattr(ferry, name)
        if isinstance(item, type):
            assert item.__doc__, name
            for attribute, value in vars(item).items():
                if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert value.__doc__, f"{name}.{attribute}"
        elif callable(item):
            assert item.__doc__, name
