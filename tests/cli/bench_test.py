"""ferry bench: every format and layout is checked before it is timed, and the figures are consistent."""

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import time
import unittest

from program import PROGRAM, ProgramTest

SMALL = ["--tokens", "1,6", "--ranks", "3", "--hidden", "128", "--experts", "12", "--top-k", "3", "--repetitions", "2",
         "--trace", "synth:uniform", "--json", "-"]


class BenchTest(ProgramTest):
    def points(self, *arguments):
        return json.loads(self.succeed("bench", *SMALL, *arguments))["points"]

    def check(self, point):
        self.assertEqual(point["routes"], point["tokens"] * point["top_k"] * point["ranks"])
        self.assertLessEqual(point["remote_pairs"], point["pairs"])
        self.assertGreater(point["rows_checked"], 0)
        for operation in (point["dispatch"], point["combine"]):
            if point["repetitions"] < 100:
                self.assertIsNone(operation["p99_us"])
            else:
                self.assertGreaterEqual(operation["p99_us"], operation["p50_us"])
            self.assertGreater(operation["p50_us"], 0)
            self.assertGreaterEqual(operation["moved_bytes"], 2 * operation["wire_bytes"])
            rate = operation["moved_bytes"] / operation["p50_us"] * 1e6
            self.assertAlmostEqual(operation["bytes_per_second"] / rate, 1, places=6)
            share = operation["bytes_per_second"] / point["memcpy_bytes_per_second"]
            self.assertAlmostEqual(operation["share_of_memcpy"] / share, 1, places=6)

    # One start of the program measures all combinations.
    def test_formats_and_layouts(self):
        formats = ["bf16", "fp32", "fp8", "fp8-columns", "mxfp4"]
        layouts = ["expert_major", "expert_padded", "rank_major"]
        points = self.points("--format", ",".join(formats), "--layout", ",".join(layouts))
        self.assertEqual([(point["format"], point["layout"], point["tokens"]) for point in points],
                         list(itertools.product(formats, layouts, [1, 6])))
        for point in points:
            with self.subTest(format=point["format"], layout=point["layout"], tokens=point["tokens"]):
                self.check(point)

    def test_scales_as_tiles_and_of_small_blocks(self):
        formats = ["mxfp8-tiles", "mxfp4-tiles", "nvfp4", "nvfp4-token", "nvfp4-token-tiles"]
        points = self.points("--format", ",".join(formats), "--layout", "expert_major,expert_padded", "--global-scale", 0.0123)
        self.assertEqual([point["format"] for point in points], [name for name in formats for _ in range(4)])
        for point in points:
            with self.subTest(format=point["format"], layout=point["layout"], tokens=point["tokens"]):
                self.check(point)

    def test_reductions_and_processes(self):
        reductions = ["partial", "exact", "unreduced"]
        points = self.points("--processes", "--reduction", ",".join(reductions))
        self.assertEqual([point["reduction"] for point in points], [name for name in reductions for _ in [1, 6]])
        for point in points:
            with self.subTest(reduction=point["reduction"], tokens=point["tokens"]):
                self.assertEqual(point["group"], "processes")
                self.check(point)

    def test_simulated_hosts(self):
        four_ranks = ["4" if before == "--ranks" else each for before, each in zip(["", *SMALL], SMALL)]
        for group in [], ["--processes"]:
            for point in json.loads(self.succeed("bench", *four_ranks, "--hosts", "2", *group))["points"]:
                self.assertEqual((point["hosts"], point["group"]),
                                 (2, f"{'processes' if group else 'threads'} on 2 simulated hosts"))
                self.check(point)

    def test_the_table(self):
        small = [word for word in SMALL if word not in ("--json", "-")]
        for repetitions in "2", "100":
            arguments = [*small, "--trace", "synth:decode", "--tokens", "1,1024", "--hidden", "1024",
                         "--repetitions", repetitions, "--json", self.path(repetitions)]
            text = self.succeed("bench", *arguments)
            self.assertLessEqual(max(len(line) for line in text.splitlines() if "Wrote" not in line), 100, text)
            self.assertEqual([line.split()[:2] for line in text.splitlines() if " dispatch " in line], 2 * [["1", "9"], ["1,024", "9,216"]])
            self.assertEqual("p99" in text, repetitions == "100")
            with open(self.path(repetitions), encoding="utf-8") as file:
                points = json.load(file)["points"]
            rates = [(point["memcpy_bytes_per_second_before"], point["memcpy_bytes_per_second_after"]) for point in points]
            unsteady = sum(max(both) > 1.25 * min(both) for both in rates)
            self.assertEqual(len(re.findall(r"(?m)^ memcpy \S+ [GM]B/s before, \S+ [GM]B/s after ", text)), unsteady, text)
            self.assertEqual(len(re.findall(r"(?m)^ {7}memcpy \S+ [GM]B/s ", text)), 4 - unsteady, text)
            self.assertEqual("Warning: beside" in text, unsteady > 0)
            for point, both in zip(points, rates):
                self.assertAlmostEqual(point["memcpy_bytes_per_second"] / sum(both), 0.5, places=6)
            self.assertTrue(text.endswith(f"\nWrote     {self.path(repetitions)}\n"), text)

    def test_an_interrupted_sweep_keeps_what_is_measured(self):
        report = self.path("bench.json")
        with subprocess.Popen([PROGRAM, "bench", "--trace", "synth:uniform", "--hidden", "1024", "--tokens", "1,4096", "--ranks", "2",
                               "--repetitions", "200", "--json", report], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            printed = ""
            while " combine " not in printed:
                printed += process.stdout.readline()
            for _ in range(100):
                if os.path.exists(report):
                    break
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(), -signal.SIGINT)
        self.assertEqual(os.listdir(self.folder), ["bench.json"])
        with open(report, encoding="utf-8") as file:
            points = json.load(file)["points"]
        self.assertEqual([point["tokens"] for point in points], [1])
        self.assertRegex(printed, r"(?m)^ +1 +16 ")

    def test_readme_measures_what_this_machine_can(self):
        text = self.succeed("bench", "--readme", "--repetitions", "1", "--json", self.path("readme.json"))
        with open(self.path("readme.json"), encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual((report["schema"], report["schema_version"]), ("ferry.bench.readme", 1))
        page = (pathlib.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
        table = re.search(r"<!-- plot:ratios -->\n.*?\n.*?\n(.*?)<!-- /plot -->", page, re.DOTALL)[1]
        measured = " ".join(line.split("|")[2] for line in table.splitlines())
        in_readme = [float(number) for number in re.findall(r"(?<![\w,])\d+\.\d+(?!\d)", measured)]
        self.assertEqual(len(in_readme), len(report["figures"]), measured)
        for number, figure in zip(in_readme, report["figures"]):
            with self.subTest(figure=figure):
                self.assertAlmostEqual(figure["readme"], number, delta=0.05 if "NCCL" in figure["figure"] else 0.005)
                self.assertRegex(figure["readme_date"], r"\A\d{4}-\d\d-\d\d\Z")
                if figure["figure"] == "rate / memcpy's":
                    self.assertGreater(figure["measured"], 0)
                if "skipped" in figure:
                    self.assertNotIn("measured", figure)
                    self.assertIn(f") {figure['skipped']}", " ".join(text.split()))
                else:
                    self.assertAlmostEqual(figure["ratio"], figure["measured"] / figure["readme"])
                self.assertIn(f"README.md: {figure['readme_machine']}, {figure['readme_date']}\n", text)
        if not os.path.exists("/dev/nvidia0"):
            self.assertEqual([figure["figure"] == "rate / memcpy's" for figure in report["figures"]],
                             ["skipped" not in figure for figure in report["figures"]])
        self.assertLessEqual(max(len(line) for line in text.splitlines() if "Wrote" not in line), 100, text)

    def test_refusals(self):
        self.refuse(2, ["--hosts 2", "--ranks 3"], "bench", *SMALL, "--hosts", "2")
        self.refuse(2, ["--hosts with --backend collective"], "bench", *SMALL, "--hosts", "3", "--backend", "collective")
        self.refuse(2, ["--hosts", "--hops two"], "bench", *SMALL, "--hosts", "3", "--backend", "cuda")
        self.refuse(2, ["0"], "bench", *SMALL, "--ranks", "0")
        self.refuse(2, ["nonsense"], "bench", *SMALL, "--tokens", "nonsense")


if __name__ == "__main__":
    unittest.main()
