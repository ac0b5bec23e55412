#!/usr/bin/env python3
"""Keeps the results of tests on GPUs, and writes what they show. CI has no GPU: scripts/gpu makes the results.

  keep DIR   files the tests of all parts that scripts/gpu recorded in DIR under bench/results/tests, then renders
  render     writes the column "GPUs" and the table of runs in bench/results/tests/capabilities.md, which names the tests of each
             capability, and the column "GPUs" of the summary for users, docs/capabilities.md
  check      fails if a document says anything else than `render` would write

bench/results/tests has a file for each kind of machine and part, with the newest result of every test. A result shows a capability
if it is of today's kernel sources (kernel_sources.py). Otherwise the document names its commit. A failure is shown, with its commit, until
the test passes in a newer run.
"""

import argparse
import copy
import difflib
import json
import pathlib
import re
import sys

from kernel_sources import REPOSITORY, hash_of_kernels

RECORDS = "bench/results/tests"
DOCUMENT = f"{RECORDS}/capabilities.md"
SUMMARY = "docs/capabilities.md"
RUNS = re.compile(r"(<!-- gpu-tests -->\n).*?(<!-- /gpu-tests -->)", re.DOTALL)
OUTCOMES = ("passed", "failed", "skipped")
# Fixtures that skip a test where there is no GPU, and the tests that need one: of a fixture, or skipped by themselves.
FIXTURES = re.compile(r'#include "cuda/(device_test|fault_test|devices)\.hpp"')
NEEDS_GPU = re.compile(r"^TEST(?:_F|_P|(?=.*\n  FERRY_SKIP_WITHOUT_DEVICES))\((\w+),\s*(\w+)\)", re.MULTILINE)


def without_parameter(name):
    return re.sub(r"/[^.]*$", "", name)


def tests_of_gpus(root):
    """{test as the document names it: the ways it runs on GPUs, {label: its names in records, without the parameter}}."""
    found, sources = {}, {path: path.read_text() for path in (root / "tests").rglob("*_test.cpp")}
    for path in (root / "tests").rglob("*.cpp"):
        for kind, suite in re.findall(r"^INSTANTIATE_TEST_SUITE_P\(Cuda(Threads\w*|Processes|Collective),\s*(\w+)", path.read_text(), re.MULTILINE):
            for text in sources.values():
                for test in re.findall(rf"^TEST_P\({suite},\s*(\w+)\)", text, re.MULTILINE):
                    name = f"Cuda{kind}/{suite}.{test}"
                    if kind in ("Threads", "Processes", "Collective"):
                        found.setdefault(f"{suite}.{test}", {})[kind.lower()] = [name]
                    else:  # counts only for rows that name it
                        found[name] = {"": [name]}
    for path, text in sources.items():
        if path.is_relative_to(root / "tests/cuda") and FIXTURES.search(text):
            prefixes = {}
            for prefix, suite in re.findall(r"^INSTANTIATE_TEST_SUITE_P\((\w+),\s*(\w+)", text, re.MULTILINE):
                prefixes.setdefault(suite, []).append(f"{prefix}/")
            for suite, test in NEEDS_GPU.findall(text):
                found[f"{suite}.{test}"] = {"": [f"{prefix}{suite}.{test}" for prefix in prefixes.get(suite, [""])]}
    for path in (root / "python/tests").rglob("test_*.py"):
        found[f"python_{path.stem.removeprefix('test_')}"] = {"": [f"python_{path.stem.removeprefix('test_')}"]}
    for name in re.findall(r"(?:run_named|test_nvshmem_nodes) ([a-z]\w+)", (root / "scripts/gpu").read_text()):
        found[name] = {"": [name]}
    return found


class Run:
    """One result of a part: a commit, a machine, and the outcome of each test by its full name."""

    def __init__(self, record, run):
        self.gpus, self.part = record["gpus"], record["part"]
        self.commit, self.kernels, self.date = run["commit"], run["kernels"], run["date"]
        self.changed = run["changed"]
        self.tests = names_of(run)
        self.instances = run["instances"]

    def outcome(self, name):
        """Of all instances of a test: None if this run has not all of them."""
        if name.startswith("python_"):  # a file
            found = [outcome for test, outcome in self.tests.items() if test.startswith(name + ".")]
        else:
            found = [outcome for test, outcome in self.tests.items() if without_parameter(test) == name]
        if "failed" in found:
            return "failed"
        return "passed" if found.count("passed") >= self.instances.get(name, 1) else None


def names_of(run):
    return {f"{suite}.{test}" if test else suite: outcome
            for outcome in OUTCOMES for suite, tests in run[outcome].items() for test in tests}


def by_suite(names):
    suites = {}
    for name in sorted(names):
        suite, _, test = name.partition(".")
        suites.setdefault(suite, []).append(test)
    return suites


def machine_of(record):
    """Number and model: 2xh100 of two "NVIDIA H100 80GB HBM3"."""
    gpus = record["machine"]["gpus"]
    model = next(word for word in gpus[0].split() if any(letter.isdigit() for letter in word))
    return f"{len(gpus)}x{model.lower()}"


def run_of(record):
    tests = record["tests"]
    # A test that the part's time limit ended says nothing. Otherwise one that did not end has crashed.
    stopped = record["exit_code"] == 124
    unfinished = [name.removesuffix(" did not end") for name in tests["failures"] if stopped and name.endswith(" did not end")]
    failures = {name.removesuffix(" did not end") for name in tests["failures"]} - set(unfinished)
    # A file of pytest's in which the time limit ended a test has at least one more than those that passed.
    more = {file: len(tests["names"]["passed"].get(file, [])) + 1 for file, _, _ in (name.partition(".") for name in unfinished)
            if file.startswith("python_")}
    return {key: record[key] for key in ("commit", "changed", "kernels", "date", "seconds", "settings")} | {
        "driver": record["machine"]["driver"], "passed": tests["names"]["passed"], "failed": by_suite(failures),
        "skipped": tests["names"]["skipped"], "instances": tests["instances"] | more}


def without(run, newer):
    """A run without the tests of a newer one; None if no test is left."""
    left = {name: outcome for name, outcome in names_of(run).items() if name not in newer}
    kept = {outcome: by_suite(name for name, its in left.items() if its == outcome) for outcome in OUTCOMES}
    return run | kept if left else None


def keep(root, folder):
    """Adds the records of scripts/gpu. An older run keeps the tests that no newer run of this machine and part has."""
    (root / RECORDS).mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or "kernels" not in record or "tests" not in record:
            continue  # measurements, or a part without tests
        name = machine_of(record)
        file = root / RECORDS / f"{name}-{record['part']}.json"
        kept = json.loads(file.read_text())["runs"] if file.exists() else []
        if any((run["date"], run["settings"]) == (record["date"], record["settings"]) for run in kept):
            continue
        runs = sorted([run_of(record), *kept], key=lambda run: run["date"], reverse=True)
        newer, left = set(), []
        for run in runs:
            rest = without(run, newer)
            newer |= names_of(run).keys()
            left += [rest] if rest else []
        content = {"part": record["part"], "gpus": len(record["machine"]["gpus"]), "gpu": record["machine"]["gpus"][0], "runs": left}
        file.write_text(one_line_a_suite(content))
        print(f"{file.relative_to(root)}: {sum(record['tests'][outcome] for outcome in OUTCOMES)} tests")


def one_line_a_suite(content):
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: "[" + re.sub(r",\s+", ", ", match[1]) + "]", json.dumps(content, indent=1)) + "\n"


def runs_of(root):
    """All kept runs, the newest first."""
    records = [json.loads(path.read_text()) for path in sorted((root / RECORDS).glob("*.json"))]
    return sorted((Run(record, run) for record in records for run in record["runs"]), key=lambda run: run.date, reverse=True)


def failures_of(runs):
    """{test without its parameter, or file of pytest's: the run}, where the newest result of one of its instances is a failure."""
    newest = {}
    for run in runs:
        for test, outcome in run.tests.items():
            if outcome != "skipped":
                newest.setdefault(test, (run, outcome))
    failed = {}
    for test, (run, outcome) in newest.items():
        if outcome == "failed":
            failed.setdefault(test.partition(".")[0] if test.startswith("python_") else without_parameter(test), run)
    return failed


def shown(names, runs, kernels, failures):
    """What the runs show of some tests, as the document says it."""
    today, older, missing, failed = [], [], [], {}
    for label, name in names:
        passed = [run for run in runs if run.outcome(name) == "passed"]
        if name in failures:
            failed.setdefault(failures[name].commit[:7], []).append(label)
        elif current := [run.gpus for run in passed if run.kernels == kernels]:
            today.append(max(current))
        elif passed:
            older.append(passed[0])
        else:
            missing.append(label)
    if failed:
        return "failed " + "; ".join(f"at {commit}: {listed(labels)}" for commit, labels in sorted(failed.items()))
    if missing:
        return "not run" + (f": {listed(missing)}" if len(missing) < len(names) else "")
    if older:
        oldest = min(older, key=lambda run: run.date)
        return f"{gpus(min(today + [run.gpus for run in older]))} at {oldest.commit[:7]}"
    return gpus(min(today))


def together(runs):
    """Runs of the same part, kernels and number of GPUs as one: what did not fit into one run may follow in the next."""
    merged = {}
    for run in runs:  # the newest first
        key = (run.part, run.gpus, run.kernels)
        if key in merged:
            merged[key].tests = run.tests | merged[key].tests
            merged[key].instances = run.instances | merged[key].instances
        else:
            merged[key] = copy.copy(run)
    return list(merged.values())


def listed(names):
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def gpus(count):
    return f"{count} GPU{'s' if count > 1 else ''}"


def cell_of(tests, known, runs, kernels, failures):
    """The column "GPUs" of a row that names these tests."""
    ways = {}
    for test in tests:
        for label, names in known.get(test, {}).items():
            ways.setdefault(label, []).extend((test, name) for name in names)
    found = {label: shown(names, runs, kernels, failures) for label, names in sorted(ways.items(), reverse=True)}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join((f"{label}: " if label else "own: ") + text for label, text in found.items())


def table_of_runs(runs, kernels):
    lines = ["| part | GPUs | commit | date | passed | failed | skipped | kernels |", "|---|---|---|---|---|---|---|---|"]
    for run in sorted(runs, key=lambda run: (run.part, -run.gpus, run.date)):
        counts = [str(sum(outcome == wanted for outcome in run.tests.values())) for wanted in OUTCOMES]
        commit = run.commit[:7] + (", changed" if run.changed else "")
        age = "today's" if run.kernels == kernels else "older"
        lines.append("| " + " | ".join([run.part, str(run.gpus), commit, run.date[:10], *counts, age]) + " |")
    return "\n".join(lines) + "\n" if runs else "No run is recorded.\n"


def fill_column(text, by, cell):
    """Writes cell(the text of the column `by`, the heading above) into the column "GPUs" of every table that has both."""
    lines, columns, heading = [], None, ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            columns = None
            heading = line.lstrip("# ") if line.startswith("#") else heading
        elif columns is None:
            columns = (cells.index(by), cells.index("GPUs")) if {by, "GPUs"} <= set(cells) else ()
        elif columns and not set(line) <= set("|-: "):
            cells[columns[1]:] = [cell(cells[columns[0]], heading)]
            line = "| " + " | ".join(cells) + " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def summary_of(cells):
    """What the cells of a table show together, for users."""
    cells = [cell for cell in cells if cell]
    failed = sum("failed" in cell for cell in cells)
    earlier = sum(" at " in cell and "failed" not in cell and "not run" not in cell for cell in cells)
    passed = sum("failed" not in cell and "not run" not in cell for cell in cells)
    if not cells:
        return "no GPU is used"
    details = [f"{earlier} with earlier kernels"] * bool(earlier) + [f"{failed} failed"] * bool(failed)
    return f"{passed} of {len(cells)}" + (f" ({', '.join(details)})" if details else "")


def rendered(text, summary, known, runs, kernels):
    """Both documents."""
    claims, failures, found = together(runs), failures_of(runs), {}

    def of_capability(tests, heading):
        cell = cell_of(re.findall(r"`([^`]+)`", tests), known, claims, kernels, failures)
        found.setdefault(heading, []).append(cell)
        return cell

    text = fill_column(text, "test", of_capability)
    summary = fill_column(summary, "area", lambda area, _: summary_of(found[area]))
    return RUNS.sub(lambda match: match[1] + table_of_runs(runs, kernels) + match[2], text), summary


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("keep", "render", "check"))
    parser.add_argument("folder", type=pathlib.Path, nargs="?", help="of the records, for keep")
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="of the repository")
    given = parser.parse_args()
    if (given.what == "keep") != bool(given.folder):
        parser.error("keep, and only keep, needs a folder")
    if given.what == "keep":
        keep(given.root, given.folder)
    before = [(given.root / name).read_text() for name in (DOCUMENT, SUMMARY)]
    after = rendered(*before, tests_of_gpus(given.root), runs_of(given.root), hash_of_kernels(given.root))
    wrong = False
    for name, old, new in zip((DOCUMENT, SUMMARY), before, after, strict=True):
        if given.what != "check":
            (given.root / name).write_text(new)
        elif new != old:
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name}, by the records"))
            wrong = True
    if wrong:
        sys.exit(f"a document says what the records in {RECORDS} do not: run scripts/gpu_tests.py render")


if __name__ == "__main__":
    main()
