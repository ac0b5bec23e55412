#!/usr/bin/env python3
"""Registers, stack, spills and shared memory of the kernels, as optimised in a release: all that a machine without a GPU can see of
a GPU's speed. bench/results/kernels/sm_90.json keeps them, with a hash of the device code of each file: of what the compiler makes of
it without optimising, which takes a second, and of the .cu and .cuh files, whose pragmas count only later.

  check BUILD [--all]   compiles the files whose code is not that of the table, or all; fails if a kernel differs from the table
  record BUILD [--all]  does the same, and writes what it finds into the table, whose changes a reviewer then sees

Both also compile two files for sm_100, with --all all files: without optimising, to see that it can be done.

BUILD has a compile_commands.json with the CUDA backend. Its --Ofast-compile is left out. Sources of another toolkit than the table's
are not compared. A kernel of the NVSHMEM module gets its registers when the module is linked, so it is not in the table.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from kernel_sources import REPOSITORY, code_of, with_included

TABLE = "bench/results/kernels/sm_90.json"
FOLDER = "src/backends/cuda"
# The sources have no code of one architecture alone, so these two stand for the others: one sums rows, one converts formats.
ALSO_FOR_SM_100 = ("combine/kernels/combine_plain.cu", "dispatch/kernels/dispatch_mx.cu")
# What `ptxas -v` says of a kernel, and of a function that it calls.
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
STACK = re.compile(r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


class KernelFile:
    """A .cu file and how it is compiled."""

    def __init__(self, path, command, root):
        self.name = str(path.relative_to(root / FOLDER))
        words = shlex.split(command)
        words = words[next(i for i, word in enumerate(words) if word.endswith("nvcc")) :]
        self.compiler = words[0]
        self.places = [word for word in words if word.startswith(("-I", "-isystem"))]
        self.path = path
        # What decides the code. CI's build has --Ofast-compile in place of -O3, which says nothing of device code.
        text = re.sub(r" -([cox]|MF|MT) \S+", "", " ".join(words[1:]))
        self.options = [word for word in text.split() if not re.match(r"-I|-isystem|-MD|-O|--Ofast|--generate-code", word)]
        texts = {of: (root / of).read_text() for of in with_included([path], root)}
        self.text = "\n".join(code_of(re.sub(r"^\s*#include.*", "", text, flags=re.MULTILINE)) for of, text in texts.items()
                              if of.suffix in (".cu", ".cuh") or "#pragma unroll" in text)

    def compiled(self, *options, architecture="sm_90"):
        """What the compiler says, and what it makes."""
        launcher = shlex.split(os.environ.get("CMAKE_CUDA_COMPILER_LAUNCHER", ""))
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder, f"{self.path.name}.o")
            command = [*launcher, self.compiler, *self.options, *self.places, f"-arch={architecture}", *options, str(self.path), "-o", str(made)]
            done = subprocess.run(command, text=True, capture_output=True)
            if done.returncode != 0:
                raise SystemExit(f"{shlex.join(command)}\n{done.stderr}")
            return done.stderr + done.stdout, made.read_bytes()

    def code(self):
        """The hash of the device code."""
        ptx = self.compiled("--Ofast-compile=max", "-ptx")[1].decode()
        ptx = re.sub(r"^//.*", "", ptx, flags=re.MULTILINE)  # the compiler's version
        # Names of a file alone have parts made from its path and from what it includes: their length, then that many characters.
        part = re.compile(r"(\d+)((?:_GLOBAL__N_|_INTERNAL_)\w+)")
        while part.search(ptx):
            ptx = part.sub(lambda match: match[2][int(match[1]) :], ptx)
        return hashlib.sha256(f"{self.text}\n{ptx}".encode()).hexdigest()[:16]

    def compile_for_sm_100(self):
        self.compiled("--Ofast-compile=max", "-c", architecture="sm_100")

    def resources(self):
        return resources_in(self.compiled("-O3", "-Xptxas=-v", "-c")[0])


def readable(names):
    text = subprocess.run(["c++filt"], input="\n".join(names), text=True, check=True, capture_output=True).stdout
    for pattern in (r"^void ", r"\(anonymous namespace\)::", r"_GLOBAL__N__\w+::", r"_INTERNAL\w+::", r"ferry::(cuda::)?", r"\((?=[^()]*\)$).*$"):
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    return text.splitlines()


def resources_in(log):
    """{kernel or function: what it takes} of what `ptxas -v` says."""
    found, kernel = {}, None
    for line in re.split(r"^ptxas info\s*: ", log, flags=re.MULTILINE):
        if entry := ENTRY.search(line):
            kernel = entry[1]
        for name, *numbers in STACK.findall(line):
            of = found.setdefault(name, {"stack": 0, "spill_stores": 0, "spill_loads": 0})
            # A function is compiled once for each kernel that calls it.
            of.update({kind: max(of[kind], int(number)) for kind, number in zip(of, numbers)})
        if (used := USED.search(line)) and kernel:
            found[kernel].update(registers=int(used[1]), shared=int(used[2] or 0))
    # Functions are of interest only where they add to the stack of every caller.
    found = {name: numbers for name, numbers in found.items() if "registers" in numbers or numbers["stack"] > 0}
    return dict(sorted(zip(readable(found), found.values())))


def differences(name, old, new):
    for kernel in sorted({*old, *new}):
        if old.get(kernel) != new.get(kernel):
            yield f"{name}: {kernel}: {old.get(kernel, 'not there')} -> {new.get(kernel, 'not there')}"


def text_of(table):
    """JSON with a line for each kernel."""
    text = json.dumps(table, indent=1)
    return re.sub(r"\{\n\s+(\"(?:registers|stack)\"[^{}]*?)\n\s+\}", lambda match: "{" + re.sub(r"\s*\n\s*", " ", match[1]) + "}", text) + "\n"


def main(arguments, root=REPOSITORY):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check", "record"))
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args(arguments)
    records = given.action == "record"
    table = json.loads((root / TABLE).read_text()) if (root / TABLE).exists() else {"toolkit": "", "files": {}}
    entries = {pathlib.Path(entry["directory"], entry["file"]).resolve(): entry["command"]
               for entry in json.loads((given.build / "compile_commands.json").read_text())}
    files = [KernelFile(path, command, root) for path, command in sorted(entries.items())
             if path.suffix == ".cu" and path.is_relative_to(root / FOLDER)]
    if not files:
        raise SystemExit(f"{given.build} compiles no file of {FOLDER}")
    version = subprocess.run([files[0].compiler, "--version"], text=True, check=True, capture_output=True).stdout
    toolkit = re.search(r"V([\d.]+)", version)[1]
    if not records and toolkit != table["toolkit"]:
        print(f"not compared: the table is of nvcc {table['toolkit']}, this is {toolkit}")
        return
    old = table["files"]
    everything = given.all or toolkit != table["toolkit"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        code = dict(zip([file.name for file in files], pool.map(KernelFile.code, files)))
        stale = [file for file in files if everything or old.get(file.name, {}).get("code") != code[file.name]]
        found = dict(zip([file.name for file in stale], pool.map(KernelFile.resources, stale)))
        list(pool.map(KernelFile.compile_for_sm_100, [file for file in files if given.all or file.name in ALSO_FOR_SM_100]))
    changes = [f"{name} is not compiled any more" for name in sorted(old.keys() - {file.name for file in files})]
    for name, kernels in found.items():
        changes += differences(name, old.get(name, {}).get("kernels", {}), kernels)
    print("\n".join([*changes, f"{len(stale)} of {len(files)} files compiled, {len(changes)} differences"]))
    if records:
        table = {"toolkit": toolkit, "files": {file.name: {"code": code[file.name], "kernels": found[file.name] if file.name in found else old[file.name]["kernels"]} for file in files}}
        (root / TABLE).parent.mkdir(parents=True, exist_ok=True)
        (root / TABLE).write_text(text_of(table))
    elif changes:
        raise SystemExit(f"{TABLE} says otherwise. If the change is meant: scripts/kernel_resources.py record {given.build}")
    elif stale:
        print(f"To save the time of compiling: scripts/kernel_resources.py record {given.build}")


if __name__ == "__main__":
    main(sys.argv[1:])
