"""ferry model: tables and JSON, calibration and check from files, refusals."""

import json
import pathlib
import unittest

from program import ProgramTest, ferry

RESULTS = pathlib.Path(__file__).parents[2] / "bench/results"
LIMITS = RESULTS / "2026-11-22-4xh200-limits.json"
CALIBRATION = [RESULTS / "model" / name
               for name in ("2026-11-22-4xh200.json", "2026-11-23-2xh200.json", "2026-11-24-1xh200.json", "2026-11-26-2xh200.json")]
SWEEP = RESULTS / "2026-11-22-4xh200-bench-sweep.json"


class ModelTest(ProgramTest):
    def calls(self, *arguments):
        report = json.loads(self.succeed("model", *arguments, "--json", "-"))
        self.assertEqual((report["schema"], report["schema_version"]), ("ferry.model.times", 1))
        return report["calls"]

    def check_width(self, text):
        self.assertLessEqual(max(len(line) for line in text.splitlines() if str(RESULTS) not in line), 100, text)

    def test_times_of_one_node(self):
        calls = self.calls("--ranks", "4", "--tokens", "1:4096", "--format", "fp8")
        self.assertEqual([call["tokens"] for call in calls if call["work"] == "dispatch"], [2**n for n in range(13)])
        for one, more in zip(calls, calls[2:]):
            self.assertLess(one["us"], more["us"])
        for call in calls:
            self.assertEqual(call["network_us"], 0)
            self.assertGreaterEqual(call["us"], call["start_us"] + call["link_us"])
        # Measured on 4 x H200: 265 us and 487 us.
        self.assertAlmostEqual(calls[-2]["us"] / 265, 1, delta=0.15)
        self.assertAlmostEqual(calls[-1]["us"] / 487, 1, delta=0.15)

    def test_every_option_matters(self):
        base = ["--ranks", "4", "--tokens", "4096", "--work", "dispatch"]
        plain = self.calls(*base)[0]["us"]
        for more in (["--format", "fp32"], ["--hidden", "14336"], ["--sms", "16"], ["--form", "phases"], ["--launch", "eager"],
                     ["--trace", "synth:decode"], ["--link-rate", "100"], ["--ranks", "8"]):
            with self.subTest(more=more):
                self.assertGreater(self.calls(*base, *more)[0]["us"], plain)
        for less in (["--format", "fp8"], ["--top-k", "2"], ["--layout", "rank_major", "--sms", "16"]):
            with self.subTest(less=less):
                self.assertLess(self.calls(*base, *less)[0]["us"],
                                plain if "--sms" not in less else self.calls(*base, "--sms", "16")[0]["us"])

    def test_several_nodes(self):
        base = ["--ranks", "32", "--nodes", "4", "--tokens", "128", "--work", "combine"]
        one, two = self.calls(*base)
        self.assertEqual((one["hops"], two["hops"]), ("one", "two"))
        self.assertLess(two["bytes"]["between_nodes"], one["bytes"]["between_nodes"])
        self.assertGreater(two["bytes"]["within_node"], one["bytes"]["within_node"])
        faster = self.calls(*base, "--network", "ib800", "--hops", "one")
        self.assertEqual(len(faster), 1)
        self.assertLess(faster[0]["us"], one["us"])
        for more in (["--nic-rate", "10"], ["--nic-latency", "50"], ["--nic-messages", "0.5"]):
            self.assertGreater(self.calls(*base, *more)[0]["us"], one["us"])
        text = self.succeed("model", *base)
        self.assertIn("ib400: 45.0 GB/s a rank", text)
        self.check_width(text)

    def test_scale(self):
        arguments = ["model", "--scale", "--tokens", "16", "--format", "fp8"]
        report = json.loads(self.succeed(*arguments, "--json", "-"))
        self.assertEqual([table["network"]["name"] for table in report["tables"]], ["ib400", "ib800"])
        for table in report["tables"]:
            self.assertEqual([point["ranks"] for point in table["points"]], [16, 32, 64, 128, 256, 512, 1024])
            self.assertEqual([point["experts"] for point in table["points"]], [256] * 5 + [512, 1024])
            for point in table["points"]:
                self.assertEqual(point["nodes"], point["ranks"] // 8)
                self.assertLess(point["two_hops"]["dispatch"]["bytes"]["between_nodes"],
                                1.3 * point["one_hop"]["dispatch"]["bytes"]["between_nodes"])
        first = report["tables"][0]["points"][0]  # two nodes: at most one row for each token
        self.assertLessEqual(first["two_hops"]["dispatch"]["bytes"]["between_nodes"], 16 * (7168 + 7168 // 128 * 4))
        self.check_width(self.succeed(*arguments))

    def test_calibrate_and_check(self):
        constants = self.path("constants.json")
        text = self.succeed("model", "--calibrate", LIMITS, *CALIBRATION, "-o", constants)
        self.assertRegex(text, r"Fit       19 points, median error [\d.]+ %, worst [\d.]+ %")
        with open(constants, encoding="utf-8") as file:
            written = json.load(file)
        self.assertEqual((written["schema"], written["kept"]), ("ferry.model.constants", []))
        for model in [], ["--constants", constants]:
            text = self.succeed("model", "--check", SWEEP, *model)
            self.assertIn("6 calibrated on", text)
            self.check_width(text)
            report = json.loads(self.succeed("model", "--check", SWEEP, *model, "--json", "-"))
            points = report["records"][0]["points"]
            self.assertEqual((len(points), report["points"]), (36, 36))
            for point in points:
                self.assertAlmostEqual(point["error"], point["us"] / point["measured_us"] - 1)
            self.assertAlmostEqual(report["worst_error"], max(abs(point["error"]) for point in points))

    def test_the_page_says_what_the_program_says(self):
        page = (RESULTS.parents[1] / "docs/model.md").read_text(encoding="utf-8")
        records = sorted(RESULTS.glob("*h200-bench-*.json"))
        report = json.loads(self.succeed("model", "--check", *records, "--json", "-"))
        self.assertIn(f"<!-- errors -->{report['points']} points, median {report['median_error'] * 100:.1f} %, worst "
                      f"{report['worst_error'] * 100:.1f} %<!-- /errors -->", page)
        over = [point for record in report["records"] for point in record["points"] if abs(point["error"]) > 0.15]
        self.assertIn(f"more than 15 % at {len(over)} of the {report['points']} points", page)
        scale = self.succeed("model", "--scale", "--format", "fp8", "--tokens", "128,4096", "--network", "ib400")
        self.assertEqual(page.split("<!-- scale -->\n```text\n")[1].split("```\n<!-- /scale -->")[0], scale)

    def exchanges(self, *arguments):
        report = json.loads(self.succeed("model", "--memory", *arguments, "--json", "-"))
        self.assertEqual((report["schema"], report["schema_version"]), ("ferry.model.memory", 1))
        return report["exchanges"]

    def test_memory(self):
        few, many, *levers = self.exchanges("--ranks", "8", "--tokens", "128,4096")
        self.assertEqual([few["lever"], many["lever"], many["backend"]], [None, None, "cuda"])
        message = 2 * 7168  # bytes, a multiple of a line
        for exchange in few, many:
            tokens, sizes = exchange["tokens"], exchange["bytes"]
            self.assertEqual(sizes["dispatch_staging"], 2 * 8 * tokens * message)
            self.assertGreaterEqual(sizes["combine_staging"], 2 * 8 * tokens * message)
            rows = 8 * 8 * tokens
            self.assertTrue(rows * message <= sizes["results"] < 1.01 * rows * message, sizes)
            self.assertEqual(sizes["total"], sum(value for name, value in sizes.items() if name != "total"))
        self.assertEqual([lever["lever"].split(" ")[0] for lever in levers], ["capacity", "own_receive_buffers", "format", "max_tokens"])
        for lever in levers:
            self.assertLess(lever["bytes"]["total"], many["bytes"]["total"])
        between = self.exchanges("--ranks", "64", "--nodes", "8", "--tokens", "128")
        self.assertEqual([(each["backend"], each["hops"]) for each in between[:2]], [("nvshmem", "one"), ("nvshmem", "two")])
        text = self.succeed("model", "--memory", "--ranks", "64", "--tokens", "4096")
        self.assertIn("own_receive_buffers = false", text)
        self.check_width(text)
        for layout in "expert_padded", "rank_major":
            self.assertLess(self.exchanges("--layout", layout, "--tokens", "64")[1]["bytes"]["results"],
                            self.exchanges("--layout", layout, "--tokens", "64")[0]["bytes"]["results"])
        self.refuse(2, ["--sms 4: --memory takes no times"], "model", "--memory", "--sms", "4")
        self.refuse(2, ["--nodes 3", "--ranks 8"], "model", "--memory", "--nodes", "3")
        self.refuse(2, ["give one of them"], "model", "--memory", "--scale")
        self.refuse(3, ["groups of up to 256 ranks, got 512"], "model", "--memory", "--ranks", "512")

    def test_the_page_about_memory_says_what_the_program_says(self):
        page = (RESULTS.parents[1] / "docs/memory.md").read_text(encoding="utf-8")

        def gigabytes(value):
            return f"{value / 1e9:.2f}" if value < 9.995e9 else f"{value / 1e9:.1f}"

        rows = []
        for ranks, nodes in (8, 1), (64, 1), (256, 1), (64, 8), (256, 32):
            for tokens in 128, 4096:
                hops = ["--hops", "two"] if nodes > 1 else []
                plain, *levers = self.exchanges("--ranks", ranks, "--nodes", nodes, "--tokens", tokens, *hops)
                total, results = plain["bytes"]["total"], plain["bytes"]["results"]
                figures = [total, results, total - results, *(lever["bytes"]["total"] for lever in levers[:3])]
                rows.append(f"| {ranks} on {nodes} node{'s' if nodes > 1 else ''} | {tokens:,} | {' | '.join(map(gigabytes, figures))} |\n")
        table = page.split("<!-- memory -->\n")[1].split("<!-- /memory -->")[0]
        self.assertEqual(table.split("|---|\n")[1], "".join(rows))

    def test_a_check_beyond_the_targets_fails(self):
        constants = self.path("constants.json")
        self.succeed("model", "--calibrate", LIMITS, *CALIBRATION, "-o", constants)
        with open(constants, encoding="utf-8") as file:
            written = json.load(file)
        written["constants"]["dispatch_few"]["value"] *= 3
        with open(constants, "w", encoding="utf-8") as file:
            json.dump(written, file)
        self.refuse_after_output(["targets are 15 % and 30 %", "--calibrate"], "model", "--check", SWEEP, "--constants", constants)

    def refuse_after_output(self, words, *arguments):
        done = ferry(*arguments)
        self.assertEqual(done.returncode, 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_refusals(self):
        cpu = RESULTS / "2026-11-24-cpu-bench.json"
        not_json = self.path("text")
        pathlib.Path(not_json).write_text("no JSON", encoding="utf-8")
        broken = json.loads(SWEEP.read_text(encoding="utf-8"))
        del broken["measured"]["rows"][0]["pairs"]
        pathlib.Path(self.path("broken.json")).write_text(json.dumps(broken), encoding="utf-8")
        for member, value in ("p50_us", 0), ("format", "int3"), ("tokens", 0), ("hidden", "wide"):
            wrong = json.loads(SWEEP.read_text(encoding="utf-8"))
            wrong["measured"]["rows"][0][member] = value
            pathlib.Path(self.path("wrong.json")).write_text(json.dumps(wrong), encoding="utf-8")
            self.refuse(2, ["wrong.json", "ferry bench --backend cuda"], "model", "--check", self.path("wrong.json"))
        pathlib.Path(self.path("number.json")).write_text('{"schema": 1}', encoding="utf-8")
        self.refuse(2, ["number.json", "--calibrate"], "model", "--constants", self.path("number.json"))
        self.refuse(2, ["number.json", "ferry bench"], "model", "--check", self.path("number.json"))
        bench, limits = "ferry bench --backend cuda --json", "ferry limits --backend cuda --json"
        self.refuse(2, ["none.json", "No such file"], "model", "--check", self.path("none.json"))
        self.refuse(2, ["not JSON", bench], "model", "--check", not_json)
        self.refuse(2, ["schema ferry.bench, not ferry.bench.cuda", bench], "model", "--check", cpu)
        self.refuse(2, ["pairs", bench], "model", "--check", self.path("broken.json"))
        self.refuse(2, ["not ferry.limits.cuda", limits], "model", "--calibrate", SWEEP, SWEEP)
        self.refuse(2, ["--calibrate", "ferry limits"], "model", "--calibrate", LIMITS)
        self.refuse(2, ["not ferry.model.constants", "--calibrate"], "model", "--constants", SWEEP)
        self.refuse(2, ["no point is left"], "model", "--check", CALIBRATION[0])
        self.refuse(2, ["give one of them"], "model", "--scale", "--check", SWEEP)
        self.refuse(2, ["-o", "--json"], "model", "-o", self.path("x"))
        self.refuse(2, ["--experts 36", "--ranks 8"], "model", "--experts", "36")
        self.refuse(2, ["--nodes 3", "--ranks 8"], "model", "--nodes", "3")
        self.refuse(2, ["--top-k 9"], "model", "--experts", "8", "--top-k", "9")
        self.refuse(2, ["--network ether", "ib400"], "model", "--nodes", "2", "--network", "ether")
        self.refuse(2, ["--network", "--nodes"], "model", "--network", "ib400")
        self.refuse(2, ["--node-ranks 6"], "model", "--scale", "--node-ranks", "6")
        self.refuse(2, ["--scale with --trace"], "model", "--scale", "--trace", "synth:decode")
        self.refuse(2, ["--hidden 100"], "model", "--hidden", "100", "--format", "fp8")
        self.refuse(2, ["--format int3"], "model", "--format", "int3")
        self.refuse(2, ["rank_major"], "model", "--layout", "rank_major", "--reduction", "exact")
        self.refuse(2, ["synth:none"], "model", "--trace", "synth:none")

    def test_numbers_out_of_range(self):
        for option in "--nic-rate", "--nic-latency", "--nic-messages", "--link-rate":
            for value in "nan", "-nan", "inf", "-inf", "-5", "0", "1e7", "5x":
                self.refuse(2, [option, f"Value {value} not in range 0.001 to 1000000"], "model", "--nodes", "2", f"{option}={value}")
        for option, least, most in ("--ranks", 1, 2**20), ("--experts", 1, 2**20), ("--top-k", 1, 32):
            for value in least - 1, most + 1, 2**31 - 1:
                self.refuse(2, [option, f"Value {value} not in range {least} to {most}"], "model", option, value)
        self.refuse(2, ["--ranks", "1048576"], "model", "--ranks", 2**31 - 1, "--experts", 2**31 - 1, "--top-k", "1", "--tokens", "1")

    def test_the_most_ranks(self):
        calls = self.calls("--ranks", 2**20, "--experts", 2**20, "--top-k", "1", "--tokens", "1", "--work", "dispatch")
        self.assertEqual(calls[0]["ranks"], 2**20)

    def test_options_that_a_mode_does_not_read(self):
        for option, value in ("--network", "ib400"), ("--nic-rate", "45"), ("--nic-latency", "5"), ("--nic-messages", "10"), ("--hops", "two"):
            self.refuse(2, [f"{option} {value}: one node", "add --nodes N"], "model", option, value)
        for option, value in ("--ranks", "4"), ("--nodes", "4"), ("--hops", "one"), ("--work", "dispatch,pair"):
            self.refuse(2, [f"{option} {value}: --scale tabulates", "leave it out"], "model", "--scale", option, value)
        self.refuse(2, ["--node-ranks 4", "--scale", "--nodes"], "model", "--node-ranks", "4")
        for mode in ["--check", SWEEP], ["--calibrate", LIMITS, *CALIBRATION, "-o", self.path("constants.json")]:
            for option, value in ("--ranks", "4"), ("--tokens", "1,2"), ("--nic-rate", "45"), ("--node-ranks", "4"), ("--sms", "8"):
                self.refuse(2, [f"{option} {value}: {mode[0]} reads", "leave it out"], "model", option, value, *mode)
        self.refuse(2, ["--link-rate 100: --calibrate reads"], "model", "--link-rate", "100", *mode)
        self.assertFalse(pathlib.Path(self.path("constants.json")).exists())


if __name__ == "__main__":
    unittest.main()
