#!/usr/bin/env python3
"""Runs clang-tidy over the C and C++ sources of FOLDERS, as the build BUILD compiles them, alone or in a unity file.

usage: tidy.py BUILD

For a file that no build compiles clang-tidy guesses flags from the file whose path looks most alike, so a source without an entry in
BUILD/compile_commands.json is an error.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

FOLDERS = ("src", "python/src", "tools", "bench", "examples")
HEADERS = ("include/ferry", *FOLDERS)
SUFFIXES = (".c", ".cpp")
UNITY_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def entries_by_source(database):
    """{real path of a source: paths of the database's entries that compile it}."""
    found = {}
    for entry in json.loads(database.read_text()):
        path = os.path.join(entry["directory"], entry["file"])
        unity = os.path.basename(os.path.dirname(path)) == "Unity"
        for source in UNITY_INCLUDE.findall(pathlib.Path(path).read_text()) if unity else [path]:
            found.setdefault(pathlib.Path(source).resolve(), set()).add(path)
    return found


def entries_to_check(build, root):
    """The entries that compile all sources of FOLDERS. Sources without an entry are an error."""
    found = entries_by_source(build / "compile_commands.json")
    sources = [path.resolve() for folder in FOLDERS for suffix in SUFFIXES for path in sorted((root / folder).rglob(f"*{suffix}"))]
    missing = [str(path.relative_to(root.resolve())) for path in sources if path not in found]
    if missing:
        sys.exit(f"tidy.py: {build}/compile_commands.json compiles none of: {', '.join(missing)}")

    def of_a_test(entry):
        return "tests" in os.path.relpath(os.path.realpath(entry), root.resolve()).split("/")

    # Of several entries the library's or the program's: a test compiles with flags of its own.
    return sorted({min(found[path], key=lambda entry: (of_a_test(entry), entry)) for path in sources})


def main():
    build = pathlib.Path(sys.argv[1])
    # As the build spells it: a symbolic link on the way changes the names of headers.
    root = pathlib.Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE)[1])
    patterns = [f"^{re.escape(entry)}$" for entry in entries_to_check(build, root)]
    command = ["run-clang-tidy-19", "-quiet", "-j", str(os.cpu_count()), "-p", str(build), "-checks=-bugprone-suspicious-include",
               f"-header-filter=^{re.escape(str(root))}/({'|'.join(HEADERS)})/"]
    sys.exit(subprocess.run(command + patterns, check=False).returncode)


if __name__ == "__main__":
    main()
