#!/usr/bin/env python3
"""Writes the record of one part of scripts/gpu as JSON, and prints a summary line."""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess

# GoogleTest's line about a single test ends with its time; the lines of its final list do not.
LINE = re.compile(r"^\[\s*(RUN|OK|FAILED|SKIPPED)\s*\] (\S+?)(?:,? where .*?)?(?: \((\d+) ms\))?$")
PYTEST = re.compile(r"^(?:=+ )?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s\b", re.MULTILINE)
SEED = re.compile(r"^FERRY_SEED=(\d+)", re.MULTILINE)


def output_of(*command):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit():
    named = os.environ.get("FERRY_COMMIT")
    if named:
        return {"commit": named, "changed": False}
    found = output_of("git", "rev-parse", "HEAD") or "unknown"
    return {"commit": found, "changed": bool(output_of("git", "status", "--porcelain", "--untracked-files=no"))}


def machine():
    query = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpus = [line.split(", ") for line in query.splitlines()]
    return {
        "gpus": [name for name, _ in gpus],
        "driver": gpus[0][1] if gpus else "",
        "compiler": output_of("nvcc", "--version").splitlines()[-1:],
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    }


def tests_of(log):
    """Test counts. A test that started and did not end counts as failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures, running = [], None
    for line in log.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        what, name, time = match.groups()
        if what == "RUN":
            running = name
        elif time is not None:
            counts[{"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[what]] += 1
            failures += [name] if what == "FAILED" else []
            running = None
    for summary in PYTEST.findall(log):
        for count, what in re.findall(r"(\d+) (\w+)", summary):
            counts["failed" if what in ("error", "errors") else what] = int(count) + counts.get(what, 0)
        failures += re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    if running:
        counts["failed"] += 1
        failures.append(running + " did not end")
    return counts | {"failures": failures} if sum(counts.values()) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("part", "log", "status", "seconds", "memory", "filter", "to"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--points", help="file of measurements, written by the program's --json")
    given = parser.parse_args()

    log = pathlib.Path(given.log).read_text(errors="replace")
    tests = tests_of(log)
    record = commit() | {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "part": given.part,
        "settings": {"memory": given.memory, "filter": given.filter, "seeds": SEED.findall(log)},
        "exit_code": int(given.status),
        "seconds": int(given.seconds),
    }
    if tests:
        record["tests"] = tests
    if given.points and pathlib.Path(given.points).exists():
        record["measured"] = json.loads(pathlib.Path(given.points).read_text())
    pathlib.Path(given.to).write_text(json.dumps(record, indent=2) + "\n")
    words = [f"exit code {given.status}", f"{given.seconds} s"]
    if tests:
        words += [f"{tests[what]} {what}" for what in ("passed", "failed", "skipped")]
    if "measured" in record:
        words.append(f"measured: {given.points}")
    print(f"   {given.part}: {', '.join(words)}")
    if tests and tests["passed"] + tests["failed"] == 0:
        raise SystemExit("   all tests were skipped, which counts as a failure on a machine with GPUs")


if __name__ == "__main__":
    main()
