"""ferry trace: list, info and synth; a written trace can be run."""

import json
import os
import unittest

from program import SMALL, ProgramTest

RECORDED = os.environ.get("FERRY_TRACES", "")


class TraceTest(ProgramTest):
    spec = "synth:prefill:experts=32,top_k=4,tokens=100,layers=2,seed=9"

    def info(self, name, *arguments, **options):
        return json.loads(self.succeed("trace", "info", name, "--json", "-", *arguments, **options))

    def test_synth_info_run(self):
        prefix = self.path("made")
        said = self.succeed("trace", "synth", self.spec, "--out", prefix)
        for file in os.listdir(self.folder):
            self.assertIn(self.path(file), said)
        written, drawn = self.info(prefix + ".ids.npy"), self.info(self.spec)
        for key in ["layers", "tokens", "experts", "top_k", "per_layer", "median_load"]:
            self.assertEqual(written[key], drawn[key], key)
        runs = [self.run_small("--trace", name, "--layer", "1") for name in [prefix + ".ids.npy", self.spec]]
        self.assertEqual(runs[0]["load"], runs[1]["load"])
        self.assertFalse(runs[0]["workload"]["synthesised"])
        self.assertTrue(runs[1]["workload"]["synthesised"])
        self.assertEqual(runs[1]["workload"]["seed"], "9")

    def test_synth_does_not_overwrite(self):
        prefix = self.path("made")
        for ending in [".ids.npy", ".weights.npy", ".seqlens.npy"]:
            with open(prefix + ending, "w", encoding="ascii") as file:
                file.write("mine")
            self.refuse(2, [prefix + ending, "--force"], "trace", "synth", self.spec, "--out", prefix)
            with open(prefix + ending, encoding="ascii") as file:
                self.assertEqual(file.read(), "mine")
            os.remove(prefix + ending)
        self.succeed("trace", "synth", self.spec, "--out", prefix)
        self.refuse(2, ["--force"], "trace", "synth", self.spec, "--out", prefix)
        self.succeed("trace", "synth", self.spec, "--out", prefix, "--force")

    def test_info_table_agrees_with_json(self):
        table, data = self.succeed("trace", "info", self.spec), self.info(self.spec)
        self.assertEqual(len(data["per_layer"]), 2)
        for number, layer in enumerate(data["per_layer"]):
            load = layer["load"]
            self.assertEqual(load["routes"], 400)
            self.assertRegex(table, rf"(?m)^{number} +{load['max']:.2f} +{load['p99']:.2f} +{load['p90']:.2f} ")
            self.assertRegex(table, rf"(?m)^{number} +{layer['busiest_rank']:.2f} x +{layer['ranks_reached']:.2f} ")
        self.assertIn("median", table)

    def test_info_ranks(self):
        reached = [self.info(self.spec, "--ranks", ranks)["per_layer"][0]["ranks_reached"] for ranks in [1, 4]]
        self.assertEqual(reached[0], 1)
        self.assertGreater(reached[1], 1)

    def test_balance(self):
        data = json.loads(self.succeed("trace", "balance", self.spec, "--ranks", "4", "--nodes", "2", "--json", "-"))
        self.assertEqual((data["slots"], len(data["per_layer"])), (9, 2))
        table = self.succeed("trace", "balance", self.spec, "--ranks", "4", "--nodes", "2")
        for number, layer in enumerate(data["per_layer"]):
            self.assertLess(layer["busiest_rank"], layer["busiest_rank_before"])
            ranks = layer["experts_of_rank"]
            self.assertEqual({expert for rank in ranks for expert in rank}, set(range(32)))
            self.assertLessEqual(max(map(len, ranks)), 9)
            self.assertRegex(table, rf"(?m)^{number} +{layer['busiest_rank_before']:.3f} -> +{layer['busiest_rank']:.3f} ")
        self.refuse(2, ["slots = 8 or more"], "trace", "balance", self.spec, "--ranks", "4", "--slots", "7")

    def test_list_without_recorded(self):
        text = self.succeed("trace", "list")
        for word in ["synth:decode", "FERRY_TRACES is not set", "docs/traces.md"]:
            self.assertIn(word, text)

    def test_traces_in_a_folder(self):
        os.mkdir(self.path("model"))
        self.succeed("trace", "synth", self.spec, "--out", self.path("model/mine"))
        environment = {"FERRY_TRACES": self.folder}
        self.assertRegex(self.succeed("trace", "list", environment=environment), r"Recorded +model/mine\n")
        arguments = [word for word in SMALL if word != "--trace" and not word.startswith("synth:")]
        run = json.loads(self.succeed("run", *arguments, "--json", "-", environment=environment))
        self.assertEqual(run["workload"]["trace"], "model/mine")

    @unittest.skipUnless(RECORDED, "FERRY_TRACES is not set")
    def test_recorded(self):
        environment = {"FERRY_TRACES": RECORDED}
        self.assertIn("deepseek_v2_lite/intent", self.succeed("trace", "list", environment=environment))
        info = self.info("deepseek_v2_lite/intent", environment=environment)
        self.assertEqual((info["tokens"], info["experts"], info["top_k"]), (8222, 64, 6))
        arguments = [word for word in SMALL if word != "--trace" and not word.startswith("synth:")]
        run = json.loads(self.succeed("run", *arguments, "--json", "-", environment=environment))
        self.assertEqual(run["workload"]["trace"], "deepseek_v2_lite/intent")  # the default where recordings are
        self.assertTrue(all(check["passed"] for check in run["checks"]["list"]))
        sets = json.loads(self.succeed("run", *arguments, "--json", "-", "--trace", "olmoe_1b_7b/github", "--processes",
                                       environment=environment))
        self.assertTrue(all(check["passed"] for check in sets["checks"]["list"]))


if __name__ == "__main__":
    unittest.main()
