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

from kernel_sources import REPOSITORY, hash_of_kernels

# GoogleTest's line about a single test ends with its time; the lines of its final list do not.
LINE = re.compile(r"^\[\s*(RUN|OK|FAILED|SKIPPED)\s*\] (\S+?)(?:,? where .*?)?(?: \((\d+) ms\))?$")
# A test of GoogleTest's list: the parameter's value follows as a comment.
LISTED = re.compile(r"^(?:(\S+\.)|  (\S+))(?:\s+#.*)?$")
PYTEST = re.compile(r"^python/tests/\S*/test_(\w+)\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
# A test of pytest's during which the log ends: its name alone.
LAST_OF_PYTEST = re.compile(r"^python/tests/\S*/test_(\w+)\.py::(.+?) *\Z", re.MULTILINE)
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


OUTCOME = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped", "PASSED": "passed", "ERROR": "failed", "XFAIL": "passed"}
WORST = ["skipped", "passed", "failed"]


def outcomes_of(log):
    """The outcome of each test by its full name. A test that started and did not end failed. Of several repetitions the worst
    outcome counts, but a test that was skipped in one setting and ran in another has run."""
    found, running = {}, None

    def add(name, outcome):
        found[name] = max(found.get(name, outcome), outcome, key=WORST.index)

    for line in log.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        what, name, time = match.groups()
        if what == "RUN":
            if running:
                add(running, "failed")
            running = name
        elif time is not None:
            add(name, OUTCOME[what])
            running = None
    for file, name, what in PYTEST.findall(log):
        add(f"python_{file}.{name}", OUTCOME[what])
    last = LAST_OF_PYTEST.search(log)
    if last and not PYTEST.match(last[0]):
        running = f"python_{last[1]}.{last[2]}"
    if running:
        add(running, "failed")
    return found, running


def by_suite(names):
    """{suite: names of its tests}, because a suite's name is long and its tests are many."""
    suites = {}
    for name in sorted(names):
        suite, _, test = name.partition(".")
        suites.setdefault(suite, []).append(test)
    return suites


def instances_of(log):
    """How many parameters each test has that has several, from GoogleTest's lists of all tests: a run may select some, and a program
    that runs several times prints its list each time."""
    found, suite = {}, ""
    for line in log.splitlines():
        match = LISTED.match(line)
        if match and match[1]:
            suite = match[1]
        elif match and suite:
            found.setdefault(suite + match[2].partition("/")[0], set()).add(match[2])
        else:
            suite = ""
    return {name: len(tests) for name, tests in found.items() if len(tests) > 1}


def tests_of(log):
    outcomes, unfinished = outcomes_of(log)
    if not outcomes:
        return None
    names = {what: sorted(name for name, outcome in outcomes.items() if outcome == what) for what in WORST}
    plain = {re.sub(r"/[^.]*$", "", name) for name in outcomes}
    return {
        **{what: len(names[what]) for what in ("passed", "failed", "skipped")},
        "failures": [name + (" did not end" if name == unfinished else "") for name in names["failed"]],
        "names": {what: by_suite(names[what]) for what in ("passed", "skipped")},
        "instances": {name: count for name, count in instances_of(log).items() if name in plain},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("part", "log", "status", "seconds", "memory", "filter", "to"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--points", help="file of measurements, written by the program's --json")
    given = parser.parse_args()

    log = pathlib.Path(given.log).read_text(errors="replace")
    tests = tests_of(log)
    record = commit() | {
        "kernels": hash_of_kernels(),
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
        # Without the place of this checkout, which the recorded command may name.
        record["measured"] = json.loads(pathlib.Path(given.points).read_text().replace(f"{REPOSITORY}/", ""))
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
