"""--backend cuda: checked runs on machines with GPUs; otherwise an error that says what is missing."""

import json
import os
import unittest

from program import SMALL, ProgramTest

GPUS = os.path.exists("/dev/nvidia0")


class GpuTest(ProgramTest):
    @unittest.skipIf(GPUS, "this machine has GPUs")
    def test_without_gpus(self):
        built = "no cuda backend" not in self.succeed("doctor")
        missing = "no CUDA driver" if built else "no cuda backend: install a wheel or tarball that has it, or build"
        for command in [["run", *SMALL], ["run", *SMALL, "--overlap", 2], ["run", *SMALL, "--shared-experts", 1, "--input", "gathered"],
                        ["run", *SMALL, "--input", "replicated"], ["run", *SMALL, "--processes"], ["bench", "--tokens", "1"], ["limits"]]:
            with self.subTest(command=command):
                self.refuse(3, [missing], *command, "--backend", "cuda")

    def run_on_gpus(self, *arguments):
        run = self.run_small("--backend", "cuda", *arguments)
        self.assertEqual(run["configuration"]["backend"], "cuda")
        self.assertEqual(run["checks"]["passed"], run["checks"]["total"])
        self.assertGreater(run["checks"]["total"], 0)
        self.assertEqual(run["machine"]["memcpy_bytes_per_second"], 0)
        self.assertGreater(run["latency"]["experts"]["p50_us"], 0)
        return run

    # The driver takes seconds to start the program. So each layout is tested here with plain values, with fp8 and with scales in
    # columns; test_bench_layouts_formats_and_reductions below tests all combinations in one start.
    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_layouts_formats_and_reductions(self):
        for layout, form, *more in [
            ("expert_major", "fp8", "--reduction", "exact"),
            ("expert_major", "fp8-columns-pow2-packed", "--reduction", "unreduced"),
            ("expert_major", "mxfp4"),
            ("expert_padded", "fp16", "--reduction", "exact"),
            ("expert_padded", "fp8", "--processes", "--alignment", "8"),
            ("expert_padded", "fp8-columns"),
            ("rank_major", "fp32"),
            ("rank_major", "fp8"),
            ("rank_major", "mxfp8-ocp-columns"),
            ("rank_major", "fp8-columns-pow2-packed"),
            ("rank_major", "nvfp4-token"),
            ("expert_major", "mxfp8-tiles"),
            ("expert_padded", "nvfp4-tiles", "--global-scale", "0.0123"),
            ("expert_padded", "nvfp4-token-tiles"),
            ("expert_major", "nvfp4-columns", "--global-scale", "0.0123"),
        ]:
            with self.subTest(layout=layout, format=form, more=more):
                self.run_on_gpus("--layout", layout, "--format", form, *more)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_two_hops(self):
        for hosts, *more in [(2,), (2, "--reduction-level", "rank", "--format", "fp8"), (4, "--reduction", "exact", "--processes"),
                             (2, "--hidden", 2048)]:
            with self.subTest(hosts=hosts, more=more):
                self.run_on_gpus("--hops", "two", "--ranks", 4, "--hosts", hosts, *more)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_page_and_timeline(self):
        page, timeline = self.path("run.html"), self.path("run.trace.json")
        self.run_on_gpus("--html", page, "--timeline", timeline)
        self.assertGreater(os.path.getsize(page), 0)
        self.assertGreater(os.path.getsize(timeline), 0)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_shared_experts(self):
        for options in [["--reduction", "exact"], ["--format", "fp8", "--layout", "expert_padded", "--alignment", "8"]]:
            with self.subTest(options=options):
                page = self.path("shared.html")
                run = self.run_on_gpus("--shared-experts", 2, "--html", page, *options)
                self.assertEqual(run["configuration"]["shared_experts"], 2)
                self.assertEqual(run["load"]["shared_rows_per_rank"], 2 * 2 * 5)  # experts, steps, tokens
                host = self.run_small("--reduction-level", "rank", *options)
                self.assertEqual(run["load"]["rows_per_rank"], host["load"]["rows_per_rank"])
                self.assertEqual(run["dispatch"]["messages"], host["dispatch"]["messages"])
                with open(page, encoding="utf-8") as file:
                    self.assertIn('"shared_rows_per_rank":20', file.read().replace(" ", ""))

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_inputs(self):
        for given, options in [("replicated", ["--shared-experts", 1]), ("replicated", ["--format", "fp8", "--layout", "expert_padded"]),
                               ("gathered", ["--shared-experts", 1]), ("gathered", ["--format", "fp8", "--processes"])]:
            with self.subTest(given=given, options=options):
                run = self.run_on_gpus("--input", given, *options)
                self.assertEqual(run["configuration"]["input"], given)
                messages = 0 if given == "replicated" else 3 * 2 * 2 * 5  # ranks, other ranks, steps, tokens
                self.assertEqual((run["dispatch"]["messages"], run["combine"]["messages"]), (messages, messages))
        self.assertIn("all equal", self.succeed("run", *SMALL, "--backend", "cuda", "--input", "gathered", "--overlap", 2))

    # Every output of the micro-batches has the bytes of the plain program, whose sums are checked.
    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_programs(self):
        for batches, more in enumerate([["--format", "fp8"], ["--layout", "expert_padded", "--format", "mxfp8"]], 2):
            with self.subTest(more=more):
                timeline = self.path("overlap.trace.json")
                run = json.loads(self.succeed("run", *SMALL, "--backend", "cuda", "--overlap", batches, "--json", "-", "--timeline", timeline, *more))
                self.assertEqual((run["schema"], run["micro_batches"], len(run["checks"]["list"])), ("ferry.program_run", batches, 2))
                self.assertEqual(run["checks"]["passed"], run["checks"]["total"])
                for runs in (run["plain"], run["batched"]):
                    for steps in runs["timeline_us"]:
                        self.assertTrue(all(0 <= begin <= end for begin, end in steps), steps)
                with open(timeline) as file:
                    self.assertGreater(len(json.load(file)["traceEvents"]), 0)

    def bench(self, *arguments, ranks=3):
        """The rows of a small bench, each checked for consistency."""
        report = json.loads(self.succeed("bench", "--backend", "cuda", "--ranks", str(ranks), "--hidden", "128", "--experts", "12",
                                         "--top-k", "3", "--repetitions", "2", "--trace", "synth:uniform", "--json", "-",
                                         *arguments))
        self.assertEqual((report["schema"], report["schema_version"]), ("ferry.bench.cuda", 3))
        push = {entry["sms"]: entry["bytes_per_second"] for entry in report["limits"][0]["push"]}
        for row in report["rows"]:
            if "skipped" not in row:
                self.check_row(row, push)
        return report["rows"]

    def check_row(self, row, push):
        self.assertGreater(row["rows_checked"], 0, row)
        self.assertGreater(row["p50_us"], 0)
        self.assertTrue(row["p99_us"] is None or row["p99_us"] >= row["p50_us"])
        best = max(bytes for sms, bytes in push.items() if row["sm_limit"] == 0 or sms <= row["sm_limit"])
        self.assertAlmostEqual(row["push_bytes_per_second"] / best, 1, places=6)
        self.assertAlmostEqual(row["lower_bound_us"], row["lower_bound_bytes"] / best * 1e6, places=6)
        if row["lower_bound_us"] > 0:
            self.assertAlmostEqual(row["ratio_to_lower_bound"] / (row["p50_us"] / row["lower_bound_us"]), 1, places=6)
        self.assertEqual(row["host_us"] is not None, row["launch"] == "eager" and row["work"] != "nccl")

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_bench_works_and_launches(self):
        rows = self.bench("--tokens", "1,6", "--format", "bf16,fp8", "--work", "dispatch,plan,combine,pair,metadata",
                          "--launch", "graph,eager", "--sms", "0,4", "--form", "fused,phases")
        works = {row["work"] for row in rows}
        self.assertEqual(works, {"dispatch", "dispatch_plan", "combine", "pair", "metadata"})
        for work, count in {"dispatch": 32, "dispatch_plan": 32, "combine": 16, "pair": 32, "metadata": 2}.items():
            self.assertEqual(sum(row["work"] == work for row in rows), count, work)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_bench_layouts_formats_and_reductions(self):
        rows = self.bench("--tokens", "6", "--format", "bf16,fp16,fp32,fp8,fp8-columns,fp8-columns-pow2-packed,mxfp8,mxfp4-columns",
                          "--layout", "expert_major,expert_padded,rank_major", "--reduction", "partial,exact,unreduced")
        self.assertEqual(sum(row["work"] == "dispatch" for row in rows), 24)
        self.assertEqual(sum(row["work"] == "combine" for row in rows), 3 * (3 + 3 + 1))

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_bench_in_two_hops(self):
        rows = self.bench("--tokens", "1,6", "--format", "bf16,fp8", "--work", "dispatch,plan,combine,pair,metadata", "--hops", "two",
                          "--hosts", "2", ranks=4)
        self.assertEqual({(row["hops"], row["hosts"]) for row in rows}, {("two", 2)})

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_bench_scales_as_tiles(self):
        formats = "mxfp8-tiles,mxfp4-tiles,nvfp4-tiles,nvfp4-token-tiles"
        rows = self.bench("--tokens", "6", "--format", formats, "--layout", "expert_major,expert_padded", "--work", "dispatch",
                          "--global-scale", "0.0123")
        self.assertEqual(len(rows), 8)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_bench_beside_nccl(self):
        rows = self.bench("--tokens", "6", "--work", "dispatch,nccl", ranks=2)
        self.assertEqual([row["work"] for row in rows], ["dispatch", "nccl", "nccl_rows"])
        without = self.bench("--tokens", "6", "--work", "dispatch,nccl", "--nccl", "/nowhere/libnccl.so.2")
        self.assertNotIn("skipped", without[0])
        for row in without[1:]:
            self.assertIn("/nowhere/libnccl.so.2", row["skipped"])

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_readme(self):
        gpus = len(json.loads(self.succeed("limits", "--backend", "cuda", "--ranks", "2", "--json", "-"))["gpus"])
        figures = json.loads(self.succeed("bench", "--readme", "--repetitions", "2", "--json", "-"))["figures"]
        for figure in figures:
            with self.subTest(figure=figure):
                if figure["figure"] == "rate / memcpy's" or gpus >= figure["ranks"] and "NCCL" not in figure["figure"]:
                    self.assertGreater(figure["measured"], 0)
                elif gpus < figure["ranks"]:
                    self.assertEqual(figure["skipped"], f"needs {figure['ranks']} GPUs, one for each rank; this machine has {gpus}")
                elif "skipped" in figure:  # where NCCL is not found
                    self.assertIn("libnccl", figure["skipped"])

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_limits(self):
        self.assertTrue(json.loads(self.succeed("limits", "--backend", "cuda", "--ranks", "2", "--json", "-")))


if __name__ == "__main__":
    unittest.main()
