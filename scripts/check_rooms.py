#!/usr/bin/env python3
"""Checks the includes between the folders of src/: each folder includes only headers of the folders that ROOMS allows it.

ROOMS goes from the bottom up, and a folder may include only folders that stand before it: so no two folders include each
other, directly or over others. An arrow that no source uses is an error too, so that the table shows what is there.

The kernels of calls on one host (ONE_HOST) include nothing of BETWEEN_HOSTS, directly or over other folders.

It also refuses comparisons with the kind of one format outside src/format: what a format has is in its table.
"""

import argparse
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).parent.parent
SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
KIND = re.compile(r"[=!]=\s*FormatKind::|FormatKind::\w+\s*[=!]=|case\s+FormatKind::")

# Public headers (ferry/) may be included everywhere; a folder's own headers too.
ROOMS = {
    "base": "",
    "format": "base",
    "group/mpi": "",
    "group": "base group/mpi",
    "engine": "base group",
    "memory": "base group",
    "layout": "base format",
    "plan": "base format layout",
    "exchange": "base format group layout plan",
    "backends/cpu/kernels": "base format",
    "backends/cpu/link": "exchange group",
    "backends/cpu": "base format group memory layout plan exchange backends/cpu/kernels backends/cpu/link",
    "backends/collective": "base engine group memory plan exchange backends/cpu backends/cpu/link",
    "backends/sliced": "base format layout plan exchange",
    "backends/cuda/runtime": "base",
    "backends/cuda/memory": "base group memory backends/cuda/runtime",
    "backends/cuda/device": "base format layout",
    "backends/cuda/protocol": "base group layout backends/cuda/device",
    "backends/cuda/transport": "base backends/cuda/device backends/cuda/protocol",
    "backends/cuda/operations": "base layout plan exchange backends/cuda/runtime backends/cuda/memory backends/cuda/device"
                                " backends/cuda/protocol",
    "backends/cuda/dispatch": "base format layout plan backends/cuda/runtime backends/cuda/device backends/cuda/protocol",
    "backends/cuda/dispatch/kernels": "backends/cuda/device backends/cuda/dispatch",
    "backends/cuda/combine": "layout backends/cuda/runtime backends/cuda/device backends/cuda/protocol"
                             " backends/cuda/operations backends/cuda/dispatch",
    "backends/cuda/combine/kernels": "backends/cuda/device backends/cuda/protocol backends/cuda/combine",
    "backends/cuda/two_hops": "base layout backends/cuda/runtime backends/cuda/device backends/cuda/protocol"
                              " backends/cuda/transport",
    "backends/cuda/by_source": "exchange layout backends/cuda/runtime backends/cuda/device backends/cuda/protocol",
    "backends/cuda/host": "base format group layout plan exchange backends/collective backends/cuda/by_source backends/cuda/runtime backends/cuda/memory backends/cuda/device"
                          " backends/cuda/protocol backends/cuda/operations backends/cuda/dispatch backends/cuda/combine"
                          " backends/cuda/two_hops",
    "backends/cuda/sliced": "base backends/sliced backends/cuda/runtime backends/cuda/memory backends/cuda/device"
                            " backends/cuda/protocol backends/cuda/operations backends/cuda/host",
    "backends/cuda/replicas": "exchange plan backends/cuda/runtime backends/cuda/memory backends/cuda/host",
    "backends/cuda/engine": "base engine exchange layout plan backends/cpu/link backends/collective backends/cuda/runtime"
                            " backends/cuda/memory backends/cuda/operations backends/cuda/combine backends/cuda/host",
    "backends/nvshmem/module": "base backends/cuda/transport backends/cuda/two_hops",
    "backends/nvshmem": "base exchange group backends/cuda/runtime backends/cuda/memory backends/cuda/host backends/nvshmem/module",
    "capi": "base format plan exchange",
    "nvfuser": "base format layout plan exchange capi",
    "max": "base exchange layout plan capi",
    "program": "base exchange",
    "trace": "base format exchange capi",
}  # fmt: skip


# The kernels of calls on one host. They include nothing of how kernels reach other hosts, so their machine code cannot depend on it.
ONE_HOST = ("backends/cuda/dispatch/kernels", "backends/cuda/combine", "backends/cuda/combine/kernels", "backends/cuda/operations")
BETWEEN_HOSTS = ("backends/cuda/transport", "backends/cuda/two_hops", "backends/nvshmem", "backends/nvshmem/module")


def room_of(root, folder, name):
    """The folder that holds the included file, relative to src/; None for a public header."""
    if (root / "include" / name).exists():
        return None
    if not (root / "src" / name).exists() and (root / "src" / folder / name).exists():
        return folder  # beside the file that includes it
    return pathlib.PurePosixPath(name).parent.as_posix()


def arrows(root):
    """{(folder, included folder): the first `file includes file` that draws this arrow}"""
    found = {}
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in SOURCES:
            continue
        folder = path.parent.relative_to(root / "src").as_posix()
        for name in INCLUDE.findall(path.read_text()):
            room = room_of(root, folder, name)
            if room not in (None, folder):
                found.setdefault((folder, room), f"src/{path.relative_to(root / 'src').as_posix()} includes {name}")
    return found


def reached(folder, rooms):
    """The folders that a folder may include, directly or over others."""
    found, new = set(), {folder}
    while new:
        found |= new
        new = {room for each in new for room in rooms.get(each, "").split()} - found
    return found - {folder}


def faults(root, rooms):
    allowed = {(folder, room) for folder, listed in rooms.items() for room in listed.split()}
    order = list(rooms)
    for folder, room in sorted(allowed):
        if room not in order or order.index(room) >= order.index(folder):
            yield f"ROOMS: {folder} may include {room}, which does not stand before it"
    for folder in ONE_HOST:
        for room in sorted(reached(folder, rooms) & set(BETWEEN_HOSTS)):
            yield f"ROOMS: {folder} holds kernels of one host, and includes {room}"
    found = arrows(root)
    for arrow, example in sorted(found.items()):
        if arrow not in allowed:
            yield f"{example}: {arrow[0]} may not include {arrow[1]}; move what both need to a folder below, or add the arrow to ROOMS"
    for folder, room in sorted(allowed - set(found)):
        yield f"ROOMS: nothing in {folder} includes {room}: remove this arrow"


def compared_kinds(root):
    for place in ("src", "tools", "python/src"):
        for path in sorted((root / place).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in SOURCES or name.startswith("src/format/"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if KIND.search(line):
                    yield f"{name}:{number} compares with the kind of one format: ask encoding_of() or options_of()"


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    errors = [*faults(REPOSITORY, ROOMS), *compared_kinds(REPOSITORY)]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
