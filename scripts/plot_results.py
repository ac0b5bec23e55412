#!/usr/bin/env python3
"""Draws the plot of README.md from recorded results, and writes its ratios, for `ferry bench --readme` too.

docs/speed.svg shows the time of a dispatch and a combine from 1 to 8,192 tokens a rank, beside the lower bound: the
time the busiest rank's bytes take on the links at the best rate measured in the same run. It can be read in dark pages and on phones. README.md has the ratios
between <!-- plot:ratios --> and <!-- /plot -->, and tools/ferry/bench/readme_figures.inc has the same ones for the
program, which measures them again. Each point is of the newest record in bench/results that has it, as in
scripts/render_results.py. With --check nothing is written, and a file that would change is an error; with --print the
ratios go to standard output.
"""

import argparse
import json
import math
import pathlib
import re
from xml.sax.saxutils import escape

import render_results

REPOSITORY = pathlib.Path(__file__).parent.parent
PLOT, PAGE, INCLUDE = "docs/speed.svg", "README.md", "tools/ferry/bench/readme_figures.inc"
RATIOS = re.compile(r"(<!-- plot:ratios -->\n).*?(<!-- /plot -->)", re.DOTALL)
ROUTER = "synth:uniform"
SHAPE = {"ranks": 4, "experts": 256, "top_k": 8, "hidden": 7168, "layout": "expert_major", "sm_limit": 0, "form": "fused"}
DISPATCH_BF16 = {"work": "dispatch", "format": "bf16", "launch": "graph", "weights": True}
DISPATCH_FP8 = DISPATCH_BF16 | {"format": "fp8"}
COMBINE = {"work": "combine", "format": "bf16", "launch": "graph", "weights": True, "reduction": "partial"}
NCCL = {"work": "nccl", "format": "bf16", "launch": "eager", "weights": False}
SHAPE_ON_CPUS = {key: SHAPE[key] for key in ("ranks", "experts", "top_k", "hidden", "layout")} | {
    "tokens": 2048, "format": "bf16", "reduction": "partial", "group": "threads", "hosts": 1}


class Records(render_results.Results):
    """The points of all records of `ferry bench`, with --backend cuda and on CPUs, the newest record first."""

    def __init__(self, root):
        records = [json.loads(path.read_text()) for path in (root / "bench/results").glob("*.json")]
        super().__init__(records)
        # A record of CPUs is what --json has written.
        self.on_cpus = sorted((record for record in records if record.get("schema") == "ferry.bench"),
                              key=lambda record: record["started_at"], reverse=True)

    def points(self, where):
        """The newest row of each number of tokens a rank that matches, by that number."""
        wanted, found = SHAPE | where, {}
        for record, rows in zip(self.records, self.rows):
            matching = [row for row in rows if "skipped" not in row and matches(row, wanted)]
            new = {row["tokens"]: row | {"record": record} for row in matching if row["tokens"] not in found}
            if new and record not in self.used:
                self.used.append(record)
            found |= new
        return found

    def point_on_cpus(self):
        """The newest point of CPUs that README.md shows."""
        for record in self.on_cpus:
            for row in record["points"]:
                if matches(row, SHAPE_ON_CPUS):
                    return row | {"record": record}
        raise SystemExit(f"no record in bench/results has a point with {SHAPE_ON_CPUS}")

    def values(self, key):
        return sorted({key(record) for record in self.used})


def matches(row, wanted):
    return row["router"].split(":experts=")[0] == ROUTER and all(row[key] == value for key, value in wanted.items())


class Figure:
    """A ratio of README.md, as scripts and the program need it."""

    def __init__(self, ratio, work, row, value, decimals):
        self.ratio, self.work, self.row, self.value, self.decimals = ratio, work, row, value, decimals

    def shown(self):
        return f"{self.value:.{self.decimals}f}"

    def source(self):
        """Machine and date of the record."""
        record = self.row["record"]
        if "gpus" in record["machine"]:
            return f"{len(record['machine']['gpus'])} x {record['machine']['gpus'][0]}", record["date"][:10]
        return f"{record['machine']['cpu']}, {record['machine']['cores']} cores", record["started_at"][:10]

    def initializer(self):
        """Of a ReadmeFigure (tools/ferry/bench/readme.hpp)."""
        machine, date = self.source()
        numbers = "".join(f".{key} = {self.row[key]}, " for key in ("ranks", "tokens", "experts", "top_k", "hidden"))
        return (f"{{.ratio = ReadmeRatio::{self.ratio}, .work = Work::{self.work}, .format = \"{self.row['format']}\",\n"
                f" {numbers}.router = \"{ROUTER}\",\n"
                f" .value = {self.value:.6g}, .decimals = {self.decimals}, .machine = \"{machine}\", .date = \"{date}\"}},\n")


def bound_figures(records):
    series = {("dispatch", "bf16"): DISPATCH_BF16, ("dispatch", "fp8"): DISPATCH_FP8, ("combine", ""): COMBINE}
    for (work, form), where in series.items():
        row = records.points(where)[4096]
        yield f"{work} {form}".strip(), Figure("lower_bound", work, row, row["ratio_to_lower_bound"], 2)


def nccl_figures(records):
    ours, nccl = records.points(DISPATCH_BF16), records.points(NCCL)
    for tokens in sorted(ours.keys() & nccl.keys()):
        yield tokens, Figure("nccl", "dispatch", ours[tokens], nccl[tokens]["p50_us"] / ours[tokens]["p50_us"], 1)


def memcpy_figures(records):
    row = records.point_on_cpus()
    for work in ("dispatch", "combine"):
        yield work, Figure("memcpy", work, row, row[work]["share_of_memcpy"], 2)


def ratios(records):
    bound = [f"{name} {figure.shown()}" for name, figure in bound_figures(records)]
    nccl = [f"{figure.shown()} at {tokens:,}" for tokens, figure in nccl_figures(records)]
    memcpy = [f"{name} {figure.shown()}" for name, figure in memcpy_figures(records)]
    row = records.point_on_cpus()
    on_cpus = (f"ferry bench --ranks {row['ranks']} --tokens {row['tokens']} --trace {ROUTER} --experts {row['experts']} "
               f"--top-k {row['top_k']}")
    return ("| ratio | measured | command |\n|---|---|---|\n"
            f"| time / lower bound, 4,096 tokens a rank | {', '.join(bound)} | `./scripts/gpu build bench-sweep` |\n"
            "| time of NCCL's all-to-all-v with sorting and counts / time of Ferry's dispatch, bf16 "
            f"| {', '.join(nccl)} tokens a rank | `./scripts/gpu build bench-baseline` |\n"
            f"| on CPUs, bytes per second / memcpy's, {row['tokens']:,} tokens a rank, {row['format']} | {', '.join(memcpy)} | `{on_cpus}` |\n")


def include(records):
    """README's ratios as initializers of ReadmeFigure."""
    figures = [figure for kind in (bound_figures, nccl_figures, memcpy_figures) for _name, figure in kind(records)]
    return ("// Written by scripts/plot_results.py from bench/results: the figures of README.md.\n"
            + "".join(figure.initializer() for figure in figures))


class Panel:
    """Axes, both logarithmic, in a picture that a phone shows as wide as it is."""

    LEFT, TOP, WIDTH, HEIGHT = 52, 48, 372, 300
    TOKENS, TIME = (1, 8192), (1, 2000)

    def __init__(self):
        self.shapes = []
        for power in range(0, 14):
            x = self.x(2**power)
            self.line(x, self.TOP, x, self.TOP + self.HEIGHT, "grid")
            if power % 2 == 0:
                self.text(x, self.TOP + self.HEIGHT + 18, f"{2**power:,}", "tick", "middle")
        for time in (1, 10, 100, 1000):
            y = self.y(time)
            self.line(self.LEFT, y, self.LEFT + self.WIDTH, y, "grid")
            self.text(self.LEFT - 6, y + 4, f"{time:,}", "tick", "end")
        self.text(self.LEFT + self.WIDTH / 2, self.TOP + self.HEIGHT + 38, "tokens a rank", "tick", "middle")

    @staticmethod
    def share(value, bounds):
        low, high = (math.log(bound) for bound in bounds)
        return (math.log(value) - low) / (high - low)

    def x(self, tokens):
        return self.LEFT + self.WIDTH * self.share(tokens, self.TOKENS)

    def y(self, time):
        return self.TOP + self.HEIGHT * (1 - self.share(time, self.TIME))

    def line(self, x1, y1, x2, y2, kind):
        self.shapes.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def text(self, x, y, text, kind, anchor="start"):
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def curve(self, times, kind, marked=True):
        """Times above the lowest of the axis, joined; `times` maps tokens to microseconds."""
        at = [(self.x(tokens), self.y(time)) for tokens, time in sorted(times.items()) if time >= self.TIME[0]]
        self.shapes.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" class="{kind}"/>')
        if marked:
            self.shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" class="{kind} dot"/>' for x, y in at]

    def legend(self, number, kind, text):
        y = self.TOP + 20 + 19 * number
        self.line(self.LEFT + 10, y - 4, self.LEFT + 36, y - 4, kind)
        self.text(self.LEFT + 42, y, text, "label")


# One panel for pages in light and in dark: it has a background of its own, because a page may have another theme than the system.
STYLE = """svg { --paper: #fff; --ink: #222; --soft: #555; --grid: #e3e6ea; --bf16: #1f5fa8; --fp8: #2f8a4c; --sums: #7a3fa0; --nccl: #b4541a; }
@media (prefers-color-scheme: dark) {
svg { --paper: #16191d; --ink: #e4e6e9; --soft: #a9b0ba; --grid: #2d333b; --bf16: #6aaee6; --fp8: #66c194; --sums: #c39ae6; --nccl: #f0935f; } }
rect { fill: var(--paper); } text { font-family: system-ui, sans-serif; fill: var(--ink); }
.head { font-size: 14px; font-weight: 600; } .tick { font-size: 12px; fill: var(--soft); } .label { font-size: 13px; }
.grid { stroke: var(--grid); } polyline { fill: none; } .bf16 { stroke: var(--bf16); stroke-width: 2; } .fp8 { stroke: var(--fp8); stroke-width: 2; }
.sums { stroke: var(--sums); stroke-width: 2; } .nccl { stroke: var(--nccl); stroke-width: 2; }
.bound { stroke: var(--bf16); stroke-width: 1.5; stroke-dasharray: 5 4; } .bound8 { stroke: var(--fp8); stroke-width: 1.5; stroke-dasharray: 5 4; }
.bf16.dot { fill: var(--bf16); } .fp8.dot { fill: var(--fp8); } .sums.dot { fill: var(--sums); } .nccl.dot { fill: var(--nccl); }"""


def drawn(records):
    def times(rows, key="p50_us"):
        return {tokens: row[key] for tokens, row in rows.items()}

    panel = Panel()
    bf16, fp8, sums = (records.points(where) for where in (DISPATCH_BF16, DISPATCH_FP8, COMBINE))
    panel.curve(times(bf16, "lower_bound_us"), "bound", marked=False)
    panel.curve(times(fp8, "lower_bound_us"), "bound8", marked=False)
    panel.curve(times(records.points(NCCL)), "nccl")
    panel.curve(times(sums), "sums")
    panel.curve(times(bf16), "bf16")
    panel.curve(times(fp8), "fp8")
    for number, (kind, text) in enumerate({"nccl": "NCCL all-to-all-v, sorted, bf16", "bf16": "Ferry dispatch bf16", "fp8": "Ferry dispatch fp8",
                                           "sums": "Ferry combine bf16", "bound": "lower bound bf16", "bound8": "lower bound fp8"}.items()):
        panel.legend(number, kind, text)

    gpus = records.used[0]["machine"]["gpus"]
    dates, commits, drivers = (", ".join(records.values(key)) for key in (
        lambda record: record["date"][:10], lambda record: record["commit"][:7], lambda record: record["machine"]["driver"]))
    row = bf16[max(bf16)]
    caption = [f"{len(gpus)} x {gpus[0]}, one rank each; hidden {row['hidden']:,}, top {row['top_k']} of {row['experts']} experts,",
               "uniform routing; CUDA graphs (NCCL: eager), all SMs, median of the",
               "slowest rank. Lower bound: the busiest rank's bytes at the best rate",
               "that its links reached in the same run.",
               f"{dates}, commit {commits}, driver {drivers}."]
    top = panel.TOP + panel.HEIGHT + 62
    shapes = panel.shapes + [f'<text x="14" y="{top + 16 * number}" class="tick">{escape(text)}</text>' for number, text in enumerate(caption)]
    head = '<text x="14" y="26" class="head">Time of a call beside its lower bound, microseconds</text>'
    height = top + 16 * len(caption)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="440" height="{height}" viewBox="0 0 440 {height}" role="img" '
            f'aria-label="Time of dispatch and combine beside the lower bound, by tokens a rank">\n<style>\n{STYLE}\n</style>\n'
            f'<rect width="440" height="{height}"/>\n{head}\n' + "\n".join(shapes) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where something would change")
    parser.add_argument("--print", action="store_true", help="print the ratios and change nothing")
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="of the repository")
    given = parser.parse_args()
    records = Records(given.root)
    if given.print:
        print(ratios(records), end="")
        return
    page = (given.root / PAGE).read_text()
    wanted = {PLOT: drawn(records), PAGE: RATIOS.sub(lambda match: match[1] + ratios(records) + match[2], page),
              INCLUDE: include(records)}
    for name, text in wanted.items():
        path = given.root / name
        if path.exists() and path.read_text() == text:
            continue
        if given.check:
            raise SystemExit(f"{name} is not what bench/results makes: run scripts/plot_results.py")
        path.write_text(text)


if __name__ == "__main__":
    main()
