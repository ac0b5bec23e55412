#!/usr/bin/env python3
"""Writes the sections of README.md and docs/performance.md that show results of bench/results.

A section stands between <!-- results:NAME --> and <!-- /results -->; what is there is replaced. With --check nothing is
written, and a section that is not what the committed results make fails. Bars are those of bench/targets.json; a figure is
of the newest record that has it.
"""

import argparse
import difflib
import json
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).parent.parent
FILES = ["README.md", "docs/performance.md"]
SECTION = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)
SCHEMA = ("ferry.bench.cuda", 2)


class Results:
    """Rows of all records, the newest first."""

    def __init__(self, records):
        of_bench = [record for record in records if is_of_bench(record)]
        self.records = sorted(of_bench, key=lambda record: record["date"], reverse=True)
        self.used = []

    def find(self, where):
        """The newest row that was measured and is as asked for, or None. A router is named without its numbers."""
        for record in self.records:
            for row in record["measured"]["rows"]:
                if "skipped" not in row and all(matches(row, key, value) for key, value in where.items()):
                    if record not in self.used:
                        self.used.append(record)
                    return row
        return None


def is_of_bench(record):
    measured = record.get("measured", {})
    return (measured.get("schema"), measured.get("schema_version")) == SCHEMA


def matches(row, key, value):
    if key != "router":
        return row[key] == value
    return re.split(r":(?=\w+=)|/", row[key])[0] == value


def in_time(us):
    return f"{us:.1f} us" if us < 100 else f"{us:,.0f} us"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def bar_row(bar, row):
    for key, shown in {"of_floor": "{:g} x floor", "p50_us": "{:g} us", "host_us": "{:g} us"}.items():
        if key in bar:
            wanted, name = shown.format(bar[key]), key
    if row is None:
        return [bar["name"], wanted, "", "", "", "not measured"]
    seen = row["host_us"] if name == "host_us" else row["p50_us"]
    floor = row["floor_us"] if name != "host_us" else 0
    verdict = "reached" if row[name] <= bar[name] else "missed"
    return [bar["name"], wanted, in_time(seen), in_time(floor) if floor else "",
            f"{row['of_floor']:.2f}" if floor else "", verdict]


HEAD = ["work", "bar", "seen", "floor", "seen / floor", ""]


def section_headlines(results, bars):
    return table(HEAD, [bar_row(bar, results.find(bars["where"] | bar["where"])) for bar in bars["bars"] if "headline" in bar])


def section_bars(results, bars):
    rows = [bar_row(bar, results.find(bars["where"] | bar["where"])) for bar in bars["bars"]]
    reached, missed = (sum(row[-1] == verdict for row in rows) for verdict in ("reached", "missed"))
    summary = f"{reached} of {len(rows)} reached, {missed} missed, {len(rows) - reached - missed} not measured."
    return f"{bars['of']}. {summary}\n\n" + table(HEAD, rows)


def section_two_ranks(results, bars):
    """The same points as the bars', which are of four ranks and not asked here."""
    rows = []
    for bar in bars["bars"]:
        row = results.find(bars["where"] | bar["where"] | {"ranks": 2})
        if row is not None:
            name, _wanted, *seen, _verdict = bar_row(bar, row)
            rows.append([name, *seen])
    return table(["work", *HEAD[2:5]], rows) if rows else "Not measured.\n"


def cell(row):
    if row is None:
        return ""
    return f"{in_time(row['p50_us'])}, {row['wire_bytes_per_second'] * 1e-9:.0f} GB/s, {row['of_floor']:.2f} x"


def section_sweep(results, bars):
    columns = {"dispatch bf16": {"work": "dispatch"}, "dispatch fp8": {"work": "dispatch", "format": "fp8"},
               "combine partial": {"work": "combine", "reduction": "partial"}}
    rows = []
    for tokens in (2**power for power in range(14)):
        found = [results.find(bars["where"] | {"tokens": tokens} | where) for where in columns.values()]
        if any(found):
            rows.append([f"{tokens:,}", *map(cell, found)])
    return table(["tokens a rank", *columns], rows) if rows else "Not measured.\n"


def section_baseline(results, bars):
    works = {"dispatch bf16": {"work": "dispatch"},
             "nccl: sorted, counts, rows": {"work": "nccl", "weights": False, "launch": "eager"},
             "nccl: rows alone": {"work": "nccl_rows", "weights": False}}
    rows = []
    for tokens in (2**power for power in range(14)):
        found = [results.find(bars["where"] | {"tokens": tokens} | where) for where in works.values()]
        if all(found):
            rows.append([f"{tokens:,}", *(in_time(row["p50_us"]) for row in found),
                         f"{found[1]['p50_us'] / found[0]['p50_us']:.1f}, {found[2]['p50_us'] / found[0]['p50_us']:.1f}"])
    return table(["tokens a rank", *works, "ratios to dispatch"], rows) if rows else "Not measured.\n"


def section_sources(results, _bars):
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
    return table(["part", "commit", "date", "machine", "best push out of each rank"], rows)


# Sources come last: they name what the others have used.
SECTIONS = {"headlines": section_headlines, "bars": section_bars, "two_ranks": section_two_ranks, "sweep": section_sweep,
            "baseline": section_baseline, "sources": section_sources}


def sections_of(records, bars):
    results = Results(records)
    return {name: render(results, bars) for name, render in SECTIONS.items()}


def rendered(text, sections):
    def replace(match):
        if match[2] not in sections:
            raise SystemExit(f"there is no section '{match[2]}': {', '.join(sections)}")
        return match[1] + sections[match[2]] + match[3]

    return SECTION.sub(replace, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where something would change")
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="of the repository")
    given = parser.parse_args()
    records = [json.loads(path.read_text()) for path in sorted((given.root / "bench/results").glob("*.json"))]
    sections = sections_of(records, json.loads((given.root / "bench/targets.json").read_text()))
    differs = False
    for name in FILES:
        path = given.root / name
        old = path.read_text()
        new = rendered(old, sections)
        if given.check:
            differs = differs or new != old
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name}, rendered"))
        elif new != old:
            path.write_text(new)
    if differs:
        raise SystemExit("these sections are not what bench/results makes: run scripts/render_results.py")


if __name__ == "__main__":
    main()
