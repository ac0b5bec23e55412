#!/usr/bin/env python3
"""Measures the constants of src/backends/cuda/host/role_costs.cpp again: how a launch's blocks are divided between its roles.

For every constant it runs the measurement that the table names with the constant scaled by several factors, and prints the
best value beside the table's. It changes nothing. The program must be built with FERRY_TEST_HOOKS, which makes it read
FERRY_BLOCK_ROLES.
"""

import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TABLE = pathlib.Path(__file__).parents[1] / "src/backends/cuda/host/role_costs.cpp"
FACTORS = [0.7, 0.85, 1.15, 1.4]
NOISE = 0.005  # a smaller gain than this is none


def read_table(text):
    """The table's entries: (name, value, unit, arguments of ferry bench, measured)."""
    strings = {
        name: "".join(re.findall(r'"([^"]*)"', parts))
        for name, parts in re.findall(r'constexpr const char\* (k\w+) =\s*((?:"[^"]*"\s*)+);', text)
    }
    entries = re.findall(r'\{RoleCost::\w+, "(\w+)", ([\d.]+), (k\w+), (k\w+), (k\w+)\}', text)
    return [(name, float(value), strings[unit], strings[bench], strings[measured]) for name, value, unit, bench, measured in entries]


def measure(program, ranks, bench, override):
    """The p50 times, in microseconds, of all points of one run."""
    with tempfile.TemporaryDirectory() as folder:
        points = pathlib.Path(folder) / "points.json"
        command = [program, "bench", "--backend", "cuda", "--ranks", str(ranks), "--experts", "256", "--top-k", "8"]
        command += ["--trace", "synth:uniform", *bench.split(), "--json", str(points)]
        environment = os.environ | {"FERRY_BLOCK_ROLES": override}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [row["p50_us"] for row in json.loads(points.read_text())["rows"]]


def relative(times, baseline):
    """Geometric mean of the times' ratios to the baseline's."""
    return math.exp(sum(math.log(time / base) for time, base in zip(times, baseline, strict=True)) / len(times))


def tune(entry, arguments, baselines):
    name, value, unit, bench, measured = entry
    if bench not in baselines:
        baselines[bench] = measure(arguments.program, arguments.ranks, bench, "")
    sweep = {}
    for factor in FACTORS:
        tried = float(f"{value * factor:.4g}")
        sweep[tried] = relative(measure(arguments.program, arguments.ranks, bench, f"{name}={tried}"), baselines[bench])
    best = min(sweep, key=sweep.get)
    if sweep[best] > 1 - NOISE:
        best = value
    gain = sweep.get(best, 1.0)
    print(f"{name:24} {value:8g} {best:8g} {gain:7.3f}   " + ", ".join(f"{v:g}: {t:.3f}" for v, t in sweep.items()), flush=True)
    return {"name": name, "table": value, "unit": unit, "measured": measured, "bench": bench, "best": best,
            "best_relative_time": gain, "sweep": [{"value": v, "relative_time": t} for v, t in sweep.items()]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="ferry, built with FERRY_TEST_HOOKS")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="constants, separated by commas (default: all)")
    parser.add_argument("--json", help="writes the results to this file")
    parser.add_argument("--list", action="store_true", help="prints the table and ends")
    arguments = parser.parse_args()
    table = read_table(TABLE.read_text())
    if arguments.list:
        for name, value, unit, bench, measured in table:
            print(f"{name:24} {value:8g}  {unit}; {measured}; ferry bench {bench}")
        return
    chosen = [name for name in arguments.only.split(",") if name] or [entry[0] for entry in table]
    unknown = sorted(set(chosen) - {entry[0] for entry in table})
    if unknown:
        sys.exit(f"error: no constant {', '.join(unknown)}; --list lists them")
    print(f"{'constant':24} {'table':>8} {'best':>8} {'time':>7}   time of each value, relative to the table's")
    baselines = {}
    results = [tune(entry, arguments, baselines) for entry in table if entry[0] in chosen]
    if arguments.json:
        report = {"schema": "ferry.tune.cuda", "schema_version": 1, "ranks": arguments.ranks, "rows": results}
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
