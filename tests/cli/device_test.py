"""--backend cuda: checked runs where there are GPUs; where there are none, an error that says what is missing."""

import itertools
import json
import os
import unittest

from program import SMALL, ProgramTest

GPUS = os.path.exists("/dev/nvidia0")


class DeviceTest(ProgramTest):
    @unittest.skipIf(GPUS, "GPUs are here")
    def test_without_gpus(self):
        built = "no cuda backend" not in self.succeed("doctor")
        missing = "no CUDA driver" if built else "no cuda backend"
        for command in [["run", *SMALL], ["run", *SMALL, "--processes"], ["bench", "--tokens", "1"], ["limits"]]:
            with self.subTest(command=command):
                self.refuse(3, [missing], *command, "--backend", "cuda")

    def run_on_gpus(self, *arguments):
        run = self.run_small("--backend", "cuda", *arguments)
        self.assertEqual(run["configuration"]["backend"], "cuda")
        self.assertEqual(run["checks"]["passed"], run["checks"]["total"])
        self.assertGreater(run["checks"]["total"], 0)
        self.assertEqual(run["machine"]["memcpy_bytes_per_second"], 0)
        self.assertGreater(run["latency"]["experts"]["p50_us"], 0)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_layouts_and_formats(self):
        layouts = ["expert_major", "expert_padded", "rank_major"]
        forms = ["bf16", "fp16", "fp32", "fp8", "fp8-columns", "fp8-columns-pow2-packed"]
        for layout, form in itertools.product(layouts, forms):
            with self.subTest(layout=layout, format=form):
                self.run_on_gpus("--layout", layout, "--format", form)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_reductions_and_processes(self):
        for reduction in ["exact", "unreduced"]:
            with self.subTest(reduction=reduction):
                self.run_on_gpus("--reduction", reduction)
        self.run_on_gpus("--processes", "--alignment", "8")

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_page_and_timeline(self):
        page, timeline = self.path("run.html"), self.path("run.trace.json")
        self.succeed("run", *SMALL, "--backend", "cuda", "--html", page, "--timeline", timeline)
        self.assertGreater(os.path.getsize(page), 0)
        self.assertGreater(os.path.getsize(timeline), 0)

    @unittest.skipUnless(GPUS, "no GPU here: there is no /dev/nvidia0")
    def test_bench_and_limits(self):
        points = json.loads(self.succeed("bench", "--backend", "cuda", "--tokens", "1,6", "--ranks", "3", "--hidden", "128",
                                         "--experts", "12", "--top-k", "3", "--layout", "expert_major,rank_major",
                                         "--repetitions", "2", "--trace", "synth:uniform", "--json", "-"))["points"]
        self.assertEqual(len(points), 4)
        self.assertTrue(all(point["rows_checked"] > 0 for point in points))
        self.assertTrue(json.loads(self.succeed("limits", "--backend", "cuda", "--ranks", "2", "--json", "-")))


if __name__ == "__main__":
    unittest.main()
