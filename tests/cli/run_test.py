"""ferry run: every layout and format, with threads and processes; the report is consistent."""

import itertools
import json
import os
import signal
import subprocess
import time
import unittest

from program import BLOCK_FORMATS, FORMATS, LAYOUTS, PROGRAM, SMALL, TILED, ProgramTest

REDUCTIONS = ["partial", "exact", "unreduced"]
TWO_LAYERS = """program two_layers
input x: tokens
input ids: ids
input weights: weights
rows = dispatch(x, ids, weights)
a: outputs = call experts(rows)
y = combine(a, rows, rows)
more = dispatch(y, rows, weights) lane=1
b: outputs = call experts(more)
z = combine(b, more, weights) lane=1
output z
"""


class RunTest(ProgramTest):
    def check_report(self, run):
        self.assertEqual(len(run["checks"]["list"]), 6)
        for check in run["checks"]["list"]:
            self.assertTrue(check["passed"], check)
            self.assertEqual(check["wrong"], 0)
            self.assertGreater(check["compared"], 0)
        error = next(check["error"] for check in run["checks"]["list"] if check.get("tolerance"))
        self.assertGreaterEqual(error, 0)
        self.assertLess(error, 2e-2)

    # Every format once and every layout three times; ferry bench checks all layouts of the main formats in one run.
    def test_layouts_and_formats(self):
        for layout, form in zip(itertools.cycle(LAYOUTS), FORMATS):
            with self.subTest(layout=layout, format=form):
                run = self.run_small("--layout", layout, "--format", form)
                self.check_report(run)
                self.assertEqual(run["configuration"]["layout"], layout)
                self.assertEqual(run["configuration"]["format"], form)

    def test_scales_as_tiles_and_of_small_blocks(self):
        cases = [*itertools.product(["expert_major", "expert_padded"], TILED), *zip(itertools.cycle(LAYOUTS), BLOCK_FORMATS)]
        for layout, form in cases:
            with self.subTest(layout=layout, format=form):
                run = self.run_small("--layout", layout, "--format", form)
                self.check_report(run)
                self.assertEqual(run["configuration"]["format"], form)

    # As above, with another layout for each format.
    def test_layouts_and_formats_with_processes(self):
        for layout, form in zip(itertools.cycle(LAYOUTS[1:] + LAYOUTS[:1]), FORMATS):
            with self.subTest(layout=layout, format=form):
                run = self.run_small("--processes", "--layout", layout, "--format", form)
                self.check_report(run)
                self.assertEqual(run["configuration"]["group"], "processes")

    def test_programs(self):
        path, timeline, report, page = (self.path(name) for name in ("layers.txt", "timeline.json", "report.json", "page.html"))
        with open(path, "w", encoding="utf-8") as file:
            file.write(TWO_LAYERS)
        for batches, options in enumerate([["--layout", "rank_major"], ["--format", "fp8", "--processes"], ["--program", path]], 2):
            with self.subTest(options=options):
                table = self.succeed("run", *SMALL, "--overlap", batches, "--timeline", timeline, "--json", report, "--html", page, *options)
                values = 3 * 2 * 5 * 128  # ranks, steps, tokens, columns
                self.assertRegex(table, rf"\n{batches} micro-batches against the plain program +{values:,} values, all equal\n")
                with open(timeline, encoding="utf-8") as file:
                    events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
                self.assertEqual({event["pid"] for event in events}, {0, 1, 2})
                self.assertEqual({event["tid"] for event in events}, set(range(1 + batches)))
                self.assertGreaterEqual(min(event["dur"] for event in events), 0)
                with open(report, encoding="utf-8") as file:
                    run = json.load(file)
                self.check_program_report(run, batches, values)
                with open(page, encoding="utf-8") as file:
                    text = file.read()
                self.assertEqual(json.loads(text.split('id="run">')[1].split("</script>")[0]), run)
                boxes = sum(len(run[part]["steps"]) for part in ("plain", "batched")) * 3
                self.assertEqual(text.count("<title>"), 1 + boxes)  # the page's, and a box for each step on each rank
        self.assertIn("a second time against the plain program", self.succeed("run", *SMALL, "--program", path))

    def check_program_report(self, run, batches, values):
        self.assertEqual((run["schema"], run["schema_version"], run["micro_batches"]), ("ferry.program_run", 1, batches))
        self.assertEqual(run["checks"]["passed"], run["checks"]["total"])
        self.assertEqual(run["checks"]["list"][-1]["compared"], values)
        for part in (run["plain"], run["batched"]):
            self.assertEqual(part["text"].count(" = "), len(part["steps"]))
            self.assertEqual(len(part["times"]["runs_us"]), 2)
            self.assertEqual([len(rank) for rank in part["timeline_us"]], [len(part["steps"])] * 3)
            for rank in part["timeline_us"]:
                spans = [moment for span in rank for moment in span]
                self.assertEqual(spans, sorted(spans))
        self.assertEqual({step["micro_batch"] for step in run["batched"]["steps"]}, set(range(batches)))

    def test_reductions(self):
        for layout, reduction in itertools.product(LAYOUTS[:2], REDUCTIONS):
            with self.subTest(layout=layout, reduction=reduction):
                self.check_report(self.run_small("--layout", layout, "--reduction", reduction, "--alignment", "8"))

    def test_global_scale(self):
        for name in ["nvfp4", "nvfp4-tiles", "nvfp4-columns"]:
            with self.subTest(format=name):
                run = self.run_small("--format", name, "--global-scale", 0.0123)
                self.check_report(run)
                self.assertEqual([check for check in run["checks"]["list"] if not check["passed"]], [])

    def test_ranks(self):
        for ranks in [1, 2, 5, 20]:  # 20: more ranks than experts
            with self.subTest(ranks=ranks):
                run = self.run_small("--ranks", ranks)
                self.assertEqual(run["configuration"]["ranks"], ranks)
                failed = [check for check in run["checks"]["list"] if not check["passed"]]
                self.assertEqual(failed, [])

    def test_traffic_does_not_depend_on_the_group(self):
        threads, processes = self.run_small(), self.run_small("--processes")
        for direction in ["dispatch", "combine"]:
            self.assertEqual(threads[direction]["traffic_bytes"], processes[direction]["traffic_bytes"])
        self.assertEqual(threads["load"]["routes_per_expert"], processes["load"]["routes_per_expert"])
        self.assertEqual(threads["load"]["rows_per_rank"], processes["load"]["rows_per_rank"])

    def test_shared_experts(self):
        plain = self.run_small()
        for options in [[], ["--format", "fp8", "--layout", "expert_padded"], ["--reduction", "exact", "--processes"],
                        ["--ranks", "4", "--hosts", "2", "--alignment", "8"]]:
            with self.subTest(options=options):
                run = self.run_small("--shared-experts", 2, *options)
                self.check_report(run)
                self.assertEqual([check for check in run["checks"]["list"] if not check["passed"]], [])
                self.assertEqual(run["configuration"]["shared_experts"], 2)
                self.assertEqual(run["load"]["shared_rows_per_rank"], 2 * 2 * 5)  # experts, steps, tokens
                if not options:
                    self.assertEqual(run["load"]["rows_per_rank"], plain["load"]["rows_per_rank"])
                    self.assertEqual(run["dispatch"]["wire_bytes"], plain["dispatch"]["wire_bytes"])

    def test_inputs(self):
        plain = self.run_small("--ranks", 4)
        for given, options in itertools.product(["replicated", "gathered"], [
                [], ["--format", "fp8", "--layout", "expert_padded"], ["--shared-experts", 2, "--processes"],
                ["--hosts", 2, "--alignment", 8]]):
            with self.subTest(given=given, options=options):
                run = self.run_small("--ranks", 4, "--input", given, *options)
                self.assertEqual([check for check in run["checks"]["list"] if not check["passed"]], [])
                self.assertEqual(run["configuration"]["input"], given)
                messages = 0 if given == "replicated" else 4 * 3 * 2 * 5  # ranks, other ranks, steps, tokens
                self.assertEqual(run["dispatch"]["messages"], messages)
                self.assertEqual(run["combine"]["messages"], messages)
                if not options and given == "gathered":
                    self.assertEqual(run["load"], plain["load"])
        self.assertIn("gathered input", self.succeed("run", *SMALL, "--input", "gathered"))
        for given in ["replicated", "gathered"]:
            self.assertIn("all equal", self.succeed("run", *SMALL, "--input", given, "--overlap", 2))

    def test_simulated_hosts(self):
        for hosts, level, group in [(1, "automatic", []), (2, "automatic", []), (2, "rank", ["--processes"]), (4, "node", [])]:
            with self.subTest(hosts=hosts, level=level):
                run = self.run_small("--ranks", 4, "--hosts", hosts, "--reduction-level", level, "--format", "fp32", *group)
                self.check_report(run)
                configuration = run["configuration"]
                self.assertEqual(configuration["nodes"], hosts)
                self.assertEqual(configuration["simulated_nodes"], hosts > 1)
                self.assertEqual(configuration["node_of_rank"], [rank * hosts // 4 for rank in range(4)])
                self.assertEqual(configuration["reduction_level"], "node" if hosts > 1 and level != "rank" else "rank")
                between = sum(bytes_ for a, row in enumerate(run["dispatch"]["traffic_bytes"]) for b, bytes_ in enumerate(row)
                              if a * hosts // 4 != b * hosts // 4)
                self.assertEqual(run["dispatch"]["between_nodes_bytes"], between)
        self.refuse(2, ["--hosts 3", "--ranks 4"], "run", *SMALL, "--ranks", "4", "--hosts", "3")
        self.refuse(2, ["FERRY_HOST_ID"], "run", *SMALL, "--backend", "collective", "--hosts", "3")

    def test_beside_an_earlier_run(self):
        earlier, page = self.path("earlier.json"), self.path("run.html")
        self.succeed("run", *SMALL, "--json", earlier)
        with open(earlier, encoding="utf-8") as file:
            before = json.load(file)
        before["configuration"]["backend"] = "reference"  # which Ferry no longer has
        with open(earlier, "w", encoding="utf-8") as file:
            json.dump(before, file)
        run = self.run_small("--compare", earlier, "--format", "fp8", "--tokens", 4, "--html", page)
        self.check_report(run)
        self.assertEqual(run["compared"]["started_at"], before["started_at"])
        differences = {each["field"]: (each["earlier"], each["now"]) for each in run["compared"]["differences"]}
        self.assertEqual(differences, {"workload.tokens_per_rank": (5, 4), "configuration.max_tokens": (5, 4),
                                       "configuration.format": ("bf16", "fp8"), "configuration.backend": ("reference", "cpu")})
        self.assertEqual(run["compared"]["figures"]["dispatch"]["wire_bytes"], before["dispatch"]["wire_bytes"])
        self.assertAlmostEqual(run["compared"]["ratios"]["dispatch"]["wire_bytes"],
                               run["dispatch"]["wire_bytes"] / before["dispatch"]["wire_bytes"])
        self.assertNotIn("compared", before)
        with open(page, encoding="utf-8") as file:
            self.assertIn('"compared":{', file.read())
        self.succeed("run", *SMALL, "--json", earlier)
        table = self.succeed("run", *SMALL, "--compare", earlier)
        self.assertRegex(table, r"\nEarlier +ferry .*\n +the same settings and machine\n\Z")

    def test_layer_and_seed(self):
        first, second = self.run_small("--layer", "0"), self.run_small("--layer", "1")
        self.assertNotEqual(first["load"]["routes_per_expert"], second["load"]["routes_per_expert"])
        trace = "synth:uniform:experts=16,top_k=4,tokens=64"
        seeds = [self.run_small("--trace", trace, "--seed", seed)["load"]["routes_per_expert"] for seed in [1, 1, 2]]
        self.assertEqual(seeds[0], seeds[1])
        self.assertNotEqual(seeds[0], seeds[2])

    def test_a_stopped_rank_ends_the_run_in_time(self):
        deadline = 2
        run = subprocess.Popen([PROGRAM, "run", *SMALL, "--steps", "100000", "--processes", "--deadline", str(deadline)],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        children = []
        while len(children) < 3:
            time.sleep(0.05)
            with open(f"/proc/{run.pid}/task/{run.pid}/children", encoding="ascii") as file:
                children = file.read().split()
        time.sleep(2)  # the ranks are in the steps
        os.kill(int(children[1]), signal.SIGSTOP)
        start = time.monotonic()
        _, message = run.communicate(timeout=60)
        self.assertLess(time.monotonic() - start, deadline + 1)
        self.assertEqual(run.returncode, 3)
        self.assertRegex(message, r"no sign of rank 1 for 2 s: rank [02] waited for rank 1 in \w+ \d+ .*"
                                  r"while step \d+ of 100000 was checked \(--deadline sets how long a rank waits\)")

    def test_experts_and_top_k_of_a_synthesised_trace(self):
        run = self.run_small("--trace", "synth:prefill-grouped", "--experts", "32", "--top-k", "5")
        self.assertEqual((run["configuration"]["experts"], run["configuration"]["top_k"]), (32, 5))
        self.assertEqual(sum(run["load"]["routes_per_expert"]), 2 * 3 * 5 * 5)  # steps, ranks, tokens, top-k


if __name__ == "__main__":
    unittest.main()
