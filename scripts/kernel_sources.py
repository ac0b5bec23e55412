#!/usr/bin/env python3
"""Prints the hash of today's kernel sources, which says whether a result of a GPU is a result of today's code.

The kernel sources are the files of src/backends/cuda and every file of src and include that they include, directly or not.
Comments and white space do not count.
"""

import hashlib
import pathlib
import re

REPOSITORY = pathlib.Path(__file__).parent.parent
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
# A string or character is matched as a whole, so that what looks like a comment inside it stays.
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.DOTALL)


def with_included(paths, root):
    """The files and every file of src and include that they include, directly or not: in alphabetical order, relative to the
    repository."""
    waiting = list(paths)
    found = set(waiting)
    while waiting:
        for name in INCLUDE.findall(waiting.pop().read_text()):
            for path in (root / "src" / name, root / "include" / name):
                if path.exists() and path not in found:
                    found.add(path)
                    waiting.append(path)
    return sorted(path.relative_to(root) for path in found)


def kernel_sources(root):
    suffixes = (".cu", ".cuh", ".cpp", ".hpp")
    return with_included([path for path in (root / "src/backends/cuda").rglob("*") if path.suffix in suffixes], root)


def code_of(text):
    return " ".join(COMMENT_OR_STRING.sub(lambda match: match[1] or " ", text).split())


def hash_of(paths, root):
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\n{code_of((root / path).read_text())}\n".encode())
    return digest.hexdigest()[:16]


def hash_of_kernels(root=REPOSITORY):
    return hash_of(kernel_sources(root), root)


if __name__ == "__main__":
    print(hash_of_kernels())
