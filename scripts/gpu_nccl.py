#!/usr/bin/env python3
"""Compares the backend `collective` over NCCL with an all-to-all-v of NCCL and a copy, on two GPUs of this machine.

usage: scripts/gpu_nccl.py PROGRAM [--tokens N] [--rounds N] [--repeats N] [--seconds N] [--longest N] [--json FILE]

Runs `ferry bench --backend collective --engine nccl` with a process for each of two GPUs, in both kinds of layout: on one
host, with communicators that block (FERRY_NCCL_BLOCKING), with these and registered memory (FERRY_NCCL_REGISTER), and in two
hops as two simulated hosts of one GPU each; the settings take turns. Then, if there is time, in two hops between hosts that
NCCL takes for different ones, over its network.
Prints, for each call, the median over the repeats of its median over the rounds, with the least and the most of all, and the
ratio to the bound: the all-to-all-v of the same messages plus a copy of the bytes that are packed and unpacked.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

# The variables of both ranks, those of each rank, and more arguments. Those on one host have a target.
SETTINGS = {
    "one host": ({}, [{}, {}], ["--hops", "one"]),
    "one host, blocking": ({"FERRY_NCCL_BLOCKING": "1"}, [{}, {}], ["--hops", "one"]),
    "one host, blocking, registered": ({"FERRY_NCCL_BLOCKING": "1", "FERRY_NCCL_REGISTER": "1"}, [{}, {}], ["--hops", "one"]),
    "two hops, 1 + 1": ({}, [{"FERRY_HOST_ID": "first"}, {"FERRY_HOST_ID": "second"}], ["--hops", "two"]),
}
OVER_NETWORK = (
    "two hops, 1 + 1, network",
    ({}, [{"FERRY_HOST_ID": name, "NCCL_HOSTID": name} for name in ("first", "second")], ["--hops", "two"]),
)
TARGET = 1.25


def run(setting, options):
    shared, of_ranks, arguments = setting
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        bench = [options.program, "bench", "--backend", "collective", "--engine", "nccl", "--ranks", 2, "--trace", "synth:uniform",
                 "--tokens", options.tokens, "--layout", "expert_major,rank_major", "--repetitions", options.rounds,
                 *options.shape.split(), *arguments, "--json", report]
        command = ["timeout", "--kill-after=5", options.longest, "mpirun", "--bind-to", "none"]
        for rank, variables in enumerate(of_ranks):
            command += [":"] * (rank > 0) + ["-n", "1", "env", *(f"{name}={value}" for name, value in variables.items()), *bench]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run([str(word) for word in command], env=os.environ | root | shared, check=True)
        return json.loads(report.read_text())


def summary(name, reports):
    """A line for each layout and call."""
    lines = []
    for points in zip(*(report["points"] for report in reports)):
        for what in ("dispatch", "combine"):
            calls = [point[what] for point in points]

            def median(value):
                return statistics.median(value(call) for call in calls)

            time_us, bound = median(lambda call: call["p50_us"]), median(lambda call: call["bound_us"])
            lines.append({
                "setting": name, "layout": points[0]["layout"], "call": what, "p50_us": time_us,
                "least_us": min(call["least_us"] for call in calls), "most_us": max(call["most_us"] for call in calls),
                "all_to_all_us": median(lambda call: call["all_to_all"]["p50_us"]),
                "copy_us": median(lambda call: call["copy"]["p50_us"]), "bound_us": bound, "ratio": time_us / bound,
            })
    return lines


def print_lines(lines):
    for line in lines:
        target = f"  target {TARGET}: {'met' if line['ratio'] <= TARGET else 'missed'}" if "one host" in line["setting"] else ""
        print(f"{line['setting']:31} {line['layout']:12} {line['call']:8} {line['p50_us']:9.0f} us ({line['least_us']:.0f} to "
              f"{line['most_us']:.0f})  all-to-all {line['all_to_all_us']:.0f} + copy {line['copy_us']:.0f} us  "
              f"ratio {line['ratio']:.2f}{target}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path, help="ferry, of a build with the cuda backend")
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--shape", default="", help="more arguments of ferry bench, such as --hidden 64")
    parser.add_argument("--rounds", type=int, default=15, help="of a run, in which calls and bounds take turns")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each setting, if there is time")
    parser.add_argument("--seconds", type=float, default=55, help="no run begins that would end later, by the time of the last one")
    parser.add_argument("--longest", type=float, default=40, help="seconds after which a run is given up")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the record")
    options = parser.parse_args()
    begun, last, failed = time.monotonic(), 0.0, {}
    reports = {name: [] for name in SETTINGS}
    turns = [(name, SETTINGS[name]) for _ in range(options.repeats) for name in SETTINGS] + [OVER_NETWORK]
    for name, setting in turns:
        start = time.monotonic()
        if start - begun + last > options.seconds:
            break
        try:
            if name not in failed:
                reports.setdefault(name, []).append(run(setting, options))
                last = time.monotonic() - start
        except subprocess.CalledProcessError as error:
            failed[name] = str(error)
            print(f"{name} failed: {error}", flush=True)
    lines = [line for name, made in reports.items() if made for line in summary(name, made)]
    if options.json:
        record = {"schema": "ferry.bench.nccl", "schema_version": 1, "target": TARGET, "summary": lines, "failed": failed, "reports": reports}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print_lines(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
