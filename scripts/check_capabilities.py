#!/usr/bin/python3
"""usage: check_capabilities.py BUILD_DIRECTORY...

Fails when bench/results/tests/capabilities.md names a test that does not exist, or when a row names no test.
Every table with a column "test" is checked. Tests are named in backticks: as ctest lists them, or as Suite.Test for
tests that are instantiated with parameters. Tests in tests/cuda are looked up in their sources, because a build without
the CUDA backend does not have them.
"""

import pathlib
import re
import subprocess
import sys

from gpu_tests import DOCUMENT, tests_of_gpus

REPOSITORY = pathlib.Path(__file__).parent.parent


def tests_for_gpus():
    sources = "\n".join(path.read_text() for path in (REPOSITORY / "tests/cuda").rglob("*_test.cpp"))
    return {f"{suite}.{test}" for suite, test in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", sources, re.MULTILINE)}


def tests_of(build):
    listing = subprocess.run(["ctest", "--test-dir", build, "-N"], check=True, capture_output=True, text=True).stdout
    names = set(re.findall(r"^ *Test +#\d+: (.+?)\s*$", listing, re.MULTILINE))
    plain = {re.sub(r"/[^.]*$", "", re.sub(r"^[^.]*/(?=[^.]*\.)", "", name)) for name in names}
    return names | plain


def rows_of(path):
    """The rows of every table with a column "test": (text of the row, text of that column)."""
    header, column = True, None  # the first line of a table is its header
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = True
        elif header:
            header, column = False, cells.index("test") if "test" in cells else None
        elif column is not None and not set(line) <= set("|-: ") and column < len(cells) and any(cells):
            yield line, cells[column]


def main():
    known = set().union(*map(tests_of, sys.argv[1:])) | tests_for_gpus() | tests_of_gpus(REPOSITORY).keys()
    problems = []
    rows = list(rows_of(REPOSITORY / DOCUMENT))
    if not rows:
        problems.append(f"{DOCUMENT} has no table with a column 'test'")
    for row, cell in rows:
        named = re.findall(r"`([^`]+)`", cell)
        if not named:
            problems.append(f"names no test: {row}")
        problems += [f"no such test: {name}" for name in named if name not in known]
    print("\n".join(problems) or f"{len(rows)} capabilities, each with a test that exists")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
