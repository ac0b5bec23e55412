#!/usr/bin/env python3
"""Writes the result tables of README.md and the documents from the records in bench/results.

A table is between <!-- results:NAME --> and <!-- /results -->, and replaces what was there. With --check nothing is written, and
the script fails if a table differs from what it would write. Targets are those of bench/targets.json. Each figure comes from the
newest record that has it.
"""

import argparse
import difflib
import json
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).parent.parent
TABLE = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)
SCHEMA, VERSION = "ferry.bench.cuda", 3

# The keys of version 2 that have other names now, and its values: records keep the names of their time.
RENAMED_KEYS = {"floor_bytes": "lower_bound_bytes", "floor_us": "lower_bound_us", "of_floor": "ratio_to_lower_bound"}
RENAMED_VALUES = {("form", "halves"): "phases"}


def present(row):
    """A row of version 2 or 3 with the keys and values of version 3."""
    named = {RENAMED_KEYS.get(key, key): value for key, value in row.items()}
    return {key: RENAMED_VALUES.get((key, value), value) if isinstance(value, str) else value for key, value in named.items()}


def documents(root):
    """README.md and every document that holds a table."""
    return [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if TABLE.search(path.read_text())]


class Results:
    """The rows of all records, the newest record first."""

    def __init__(self, records):
        bench = [record for record in records if is_bench(record)]
        self.records = sorted(bench, key=lambda record: record["date"], reverse=True)
        self.rows = [[present(row) for row in record["measured"]["rows"]] for record in self.records]
        self.used = []
        self.calls = sorted((record for record in records if is_calls(record)), key=lambda record: record["date"], reverse=True)
        self.beside = sorted((record for record in records if record.get("measured", {}).get("schema") == "ferry.beside_deep_ep"),
                             key=lambda record: record["date"], reverse=True)

    def find(self, where):
        """The newest measured row with the wanted values, or None."""
        for record, rows in zip(self.records, self.rows):
            for row in rows:
                if "skipped" not in row and all(matches(row, key, value) for key, value in where.items()):
                    if record not in self.used:
                        self.used.append(record)
                    return row
        return None


def is_bench(record):
    measured = record.get("measured", {})
    return measured.get("schema") == SCHEMA and measured.get("schema_version") in (2, VERSION)


def is_calls(record):
    """Whether it is of bench/deep_ep_calls.py."""
    measured = record.get("measured", {})
    return (measured.get("schema"), measured.get("schema_version"), measured.get("backend")) == ("ferry.bench.deep_ep", 2, "cuda")


def matches(row, key, value):
    """A router is compared by name, without its parameters."""
    if key != "router":
        return row[key] == value
    return re.split(r":(?=\w+=)|/", row[key])[0] == value


def in_time(us):
    return f"{us:.1f} us" if us < 100 else f"{us:,.0f} us"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def target_row(target, row):
    for key, shown in {"ratio_to_lower_bound": "{:g} x lower bound", "p50_us": "{:g} us", "host_us": "{:g} us"}.items():
        if key in target:
            wanted, name = shown.format(target[key]), key
    if row is None:
        return [target["name"], wanted, "", "", "", "not measured"]
    on_host = name == "host_us"
    measured, bound = row["host_us" if on_host else "p50_us"], 0 if on_host else row["lower_bound_us"]
    verdict = "reached" if row[name] <= target[name] else "missed"
    return [target["name"], wanted, in_time(measured), in_time(bound) if bound else "",
            f"{row['ratio_to_lower_bound']:.2f}" if bound else "", verdict]


HEAD = ["call", "target", "measured", "lower bound", "measured / lower bound", ""]


def target_rows(results, targets, chosen):
    return [target_row(target, results.find(targets["where"] | target["where"])) for target in chosen]


def targets_table(results, targets):
    rows = target_rows(results, targets, targets["targets"])
    reached, missed = (sum(row[-1] == verdict for row in rows) for verdict in ("reached", "missed"))
    summary = f"{reached} of {len(rows)} targets reached, {missed} missed, {len(rows) - reached - missed} not measured."
    return f"{targets['setting']}. {summary}\n\n" + table(HEAD, rows)


def readme_table(results, targets):
    """The targets that README.md has, reached or not: those that say so."""
    return table(HEAD, target_rows(results, targets, [target for target in targets["targets"] if target.get("readme")]))


def two_ranks_table(results, targets):
    """The calls of the targets, measured with two ranks. The targets themselves are for four ranks."""
    rows = []
    for target in targets["targets"]:
        row = results.find(targets["where"] | target["where"] | {"ranks": 2})
        if row is not None:
            name, _wanted, *measured, _verdict = target_row(target, row)
            rows.append([name, *measured])
    return table([HEAD[0], *HEAD[2:5]], rows) if rows else "Not measured.\n"


def cell(row):
    if row is None:
        return ""
    return f"{in_time(row['p50_us'])}, {row['wire_bytes_per_second'] * 1e-9:.0f} GB/s, {row['ratio_to_lower_bound']:.2f} x"


def sweep_table(results, targets):
    columns = {"dispatch bf16": {"work": "dispatch"}, "dispatch fp8": {"work": "dispatch", "format": "fp8"},
               "combine partial": {"work": "combine", "reduction": "partial"}}
    rows = []
    for tokens in (2**power for power in range(14)):
        found = [results.find(targets["where"] | {"tokens": tokens} | where) for where in columns.values()]
        if any(found):
            rows.append([f"{tokens:,}", *map(cell, found)])
    return table(["tokens per rank", *columns], rows) if rows else "Not measured.\n"


FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4", "nvfp4-token", "mxfp8-tiles", "mxfp4-tiles", "nvfp4-tiles")


def formats_table(results, targets):
    points = [{"tokens": tokens, "ranks": ranks} for tokens in (4096, 128) for ranks in (2, 4)]
    head = ["dispatch", *(f"{point['tokens']:,} tokens, {point['ranks']} GPUs" for point in points)]
    rows = []
    for name in FORMATS:
        found = [results.find(targets["where"] | {"work": "dispatch", "format": name} | point) for point in points]
        rows.append([name, *(in_time(row["p50_us"]) if row else "" for row in found)])
    return table(head, rows)


def beside_table(results, _targets, readme=False):
    """The same calls over DeepEP and over Ferry, in one run."""
    if not results.beside:
        return "Not measured.\n"
    rows = [[(f"{row['tokens']:,}, " if row["tokens"] else "") + row["mode"] + (f", {row['sm_limit']} SMs" if row["sm_limit"] else ""), row["call"],
             in_time(row["deep_ep_us"]), in_time(row["ferry_us"]), f"{row['deep_ep_us'] / row['ferry_us']:.2f}"]
            for row in results.beside[0]["measured"]["rows"] if not readme or row.get("readme")]
    return table(["tokens a rank, mode", "call", "DeepEP V1", "Ferry", "DeepEP / Ferry"], rows)


def beside_readme_table(results, targets):
    return beside_table(results, targets, readme=True)


def newest_calls(results):
    """The newest records of calls from Python, on four GPUs and on two; None where there is none."""
    return [next((record for record in results.calls if record["measured"]["ranks"] == ranks), None) for ranks in (4, 2)]


def calls_table(results, _targets):
    """Calls of ferry.deep_ep on four GPUs, and their time in a graph on two."""
    four, two = newest_calls(results)
    if not four or not two:
        return "Not measured.\n"
    graphs = {row["call"]: row["graph_us"] for row in two["measured"]["rows"]}
    rows = [[f"{row['tokens']:,}, {row['mode']}", row["call"],
             *(in_time(us) if us else "" for us in (row["host_filled_us"], row["whole_filled_us"], row["graph_us"], graphs.get(row["call"])))]
            for row in four["measured"]["rows"]]
    sources = [f"{record['commit'][:7]}, {record['date'][:10]}" for record in (four, two)]
    head = ["tokens, mode", "call", "host", "whole", "graph", "graph, 2 GPUs"]
    return table(head, rows) + f"\nFour GPUs: {sources[0]}; two GPUs: {sources[1]}.\n"


def threads_table(results, _targets):
    """Time of the calling thread in calls of ferry.Exchange and ferry.torch; the records of calls_table have it too."""
    records = newest_calls(results)
    if None in records:
        return "Not measured.\n"
    times = [[record["python_calls_us"][call] for record in records for call in (f"dispatch{kind}", f"combine{kind}")]
             for kind in ("", ", operator", ", recorded")]
    names = ("`ferry.Exchange`", "`ferry.torch`", "`ferry.torch`, gradients recorded")
    rows = [["the same calls from C++", *(in_time(time["cpp"]) for time in times[0])],
            *([name, *(in_time(time["python"]) for time in line)] for name, line in zip(names, times, strict=True))]
    return table(["from Python", "dispatch, 4 GPUs", "combine, 4 GPUs", "dispatch, 2 GPUs", "combine, 2 GPUs"], rows)


def baseline_table(results, targets):
    calls = {"dispatch bf16": {"work": "dispatch"},
             "NCCL: sort, counts, rows": {"work": "nccl", "weights": False, "launch": "eager"},
             "NCCL: rows alone": {"work": "nccl_rows", "weights": False}}
    rows = []
    for tokens in (2**power for power in range(14)):
        found = [results.find(targets["where"] | {"tokens": tokens} | where) for where in calls.values()]
        if all(found):
            rows.append([f"{tokens:,}", *(in_time(row["p50_us"]) for row in found),
                         f"{found[1]['p50_us'] / found[0]['p50_us']:.1f}, {found[2]['p50_us'] / found[0]['p50_us']:.1f}"])
    return table(["tokens per rank", *calls, "NCCL / dispatch"], rows) if rows else "Not measured.\n"


def sources_table(results, _targets):
    if not results.used:
        return "No results are committed.\n"
    rows = []
    for record in sorted(results.used, key=lambda record: (record["date"], record["part"])):
        gpus = record["machine"]["gpus"]
        push = record["measured"]["limits"][0]["push"]
        best = max(push, key=lambda entry: entry["bytes_per_second"])
        changed = ", changed" if record.get("changed") else ""
        rows.append([record["part"], f"{record['commit'][:7]}{changed}", record["date"][:10], f"{len(gpus)} x {gpus[0]}",
                     f"{best['bytes_per_second'] * 1e-9:.0f} GB/s with {best['sms']} SMs"])
    return table(["part", "commit", "date", "machine", "best push rate out of each rank"], rows)


# By the names of the markers. "sources" comes last, because it lists the records that the other tables use.
TABLES = {"bars": targets_table, "readme": readme_table, "two_ranks": two_ranks_table, "sweep": sweep_table,
          "baseline": baseline_table, "formats": formats_table, "calls": calls_table,
          "threads": threads_table, "beside": beside_table, "beside_readme": beside_readme_table, "sources": sources_table}


def tables_of(records, targets):
    results = Results(records)
    return {name: render(results, targets) for name, render in TABLES.items()}


def rendered(text, tables):
    def replace(match):
        if match[2] not in tables:
            raise SystemExit(f"there is no table '{match[2]}': {', '.join(tables)}")
        return match[1] + tables[match[2]] + match[3]

    return TABLE.sub(replace, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table would change")
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="root of the repository; default: this one")
    given = parser.parse_args()
    records = [json.loads(path.read_text()) for path in sorted((given.root / "bench/results").glob("*.json"))]
    tables = tables_of(records, json.loads((given.root / "bench/targets.json").read_text()))
    differs = False
    for path in documents(given.root):
        name = str(path.relative_to(given.root))
        old = path.read_text()
        new = rendered(old, tables)
        if given.check:
            differs = differs or new != old
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name}, rendered"))
        elif new != old:
            path.write_text(new)
    if differs:
        raise SystemExit("these tables differ from bench/results: run scripts/render_results.py")


if __name__ == "__main__":
    main()
