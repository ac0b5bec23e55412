"""What a run writes: table, JSON, page, timeline; and that it keeps quiet in a pipe."""

import collections
import json
import os
import subprocess
import sys
import unittest

from program import SMALL, ProgramTest, ferry

CHECK_PAGE = os.environ["FERRY_CHECK_PAGE"]
NO_BROWSER = 77


class OutputsTest(ProgramTest):
    def test_table_agrees_with_json(self):
        table = self.succeed("run", *SMALL, "--json", self.path("run.json"))
        with open(self.path("run.json"), encoding="utf-8") as file:
            run = json.load(file)
        for check in run["checks"]["list"]:
            self.assertIn(f"{check['name']}: {check['compared']:,} compared, {check['wrong']:,} wrong", table)
        rows = run["load"]["rows_per_rank"]
        for rank, count in enumerate(rows):
            self.assertRegex(table, rf"(?m)^rank {rank} +{count:,} ")
        busiest = max(range(len(rows)), key=lambda rank: (rows[rank], -rank))
        self.assertIn(f"Busiest   rank {busiest}:", table)
        self.assertIn("synthesised, seed 1", table)
        self.assertIn(run["played"]["recipe"], table)

    def test_json_adds_up(self):
        run = self.run_small()
        ranks = range(run["configuration"]["ranks"])
        for direction in ["dispatch", "combine"]:
            traffic = run[direction]["traffic_bytes"]
            wire = sum(traffic[a][b] for a in ranks for b in ranks if a != b)
            self.assertEqual(wire, run[direction]["wire_bytes"])
        self.assertEqual(sum(run["load"]["rows_per_rank"]), sum(run["load"]["routes_per_expert"]))
        self.assertEqual(sum(run["load"]["routes_per_expert"]), 2 * 3 * 5 * 4)  # steps, ranks, tokens, top-k
        self.assertIn("--hidden 128", run["command"])

    def test_page(self):
        page, data = self.path("run.html"), self.path("run.json")
        self.succeed("run", *SMALL, "--html", page, "--json", data)
        done = subprocess.run([sys.executable, CHECK_PAGE, page, data], text=True, capture_output=True, check=False)
        if done.returncode == NO_BROWSER and os.environ.get("CI") != "true":
            self.skipTest("no Chromium here")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_timeline(self):
        path = self.path("run.trace.json")
        self.succeed("run", *SMALL, "--timeline", path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        lanes = collections.Counter((event["pid"], event["tid"]) for event in spans)
        self.assertEqual(lanes, {(rank, phase): 2 for rank in range(3) for phase in range(3)})
        self.assertTrue(all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans))
        for lane in lanes:
            mine = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == lane)
            self.assertLessEqual(mine[0][0] + mine[0][1], mine[1][0])  # one after the other

    def test_outputs_replace_longer_files(self):
        path = self.path("run.json")
        with open(path, "w", encoding="ascii") as file:
            file.write("x" * 1_000_000)
        self.succeed("run", *SMALL, "--json", path)
        with open(path, encoding="utf-8") as file:
            json.load(file)

    def test_refused_run_leaves_files_alone(self):
        path = self.path("run.json")
        with open(path, "w", encoding="ascii") as file:
            file.write("before")
        self.refuse(2, ["7 bf16"], "run", "--hidden", "7", "--json", path)
        with open(path, encoding="ascii") as file:
            self.assertEqual(file.read(), "before")

    def test_where_recorded_traces_are(self):
        fallback = [word for word in SMALL if not word.startswith("synth:") and word != "--trace"]
        self.assertIn("docs/traces.md", self.succeed("run", *fallback))
        self.assertNotIn("docs/traces.md", self.succeed("run", *SMALL))

    def test_progress_only_on_a_terminal(self):
        long_enough = ["run", *SMALL, "--steps", "300", "--tokens", "32", "--hidden", "512"]
        self.assertEqual(ferry(*long_enough).stderr, "")
        terminal, other = os.openpty()
        done = subprocess.Popen([os.environ["FERRY_PROGRAM"], *long_enough], stderr=other, stdout=subprocess.DEVNULL)
        os.close(other)
        seen = b""
        while True:
            try:
                piece = os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
        os.close(terminal)
        self.assertEqual(done.wait(), 0)
        self.assertIn(b" of 300", seen)


class OtherCommandsTest(ProgramTest):
    def test_doctor(self):
        text = self.succeed("doctor")
        for word in ["processor", "memory", "shared memory", "huge pages", "OpenBLAS", "MPI module", "GPU driver",
                     "traces", "ok  cpu backend, threads", "ok  cpu backend, processes"]:
            self.assertIn(word, text)

    def test_doctor_names_what_is_missing(self):
        text = self.succeed("doctor", environment={"FERRY_SHM_DIR": self.path("none")})
        self.assertRegex(text, r"(?m)^--  shared memory .* is not there$")
        self.assertRegex(text, r"(?m)^!!  cpu backend, processes .*none")

    def test_limits(self):
        limits = json.loads(self.succeed("limits", "--ranks", "3", "--json", "-"))
        self.assertIn(3, [one["threads"] for one in limits["memcpy"]])
        self.assertTrue(all(one["bytes_per_second"] > 1e8 for one in limits["memcpy"]))
        ways = {(one["group"], one["waiting"]) for one in limits["flag_one_way"]}
        self.assertEqual(len(ways), 4)
        self.assertEqual({(one["group"], one["ranks"]) for one in limits["barrier"]}, {("threads", 3), ("processes", 3)})
        for one in limits["flag_one_way"] + limits["barrier"]:
            self.assertGreater(one["seconds"], 0)
            self.assertLess(one["seconds"], 1)

    def test_limits_table(self):
        text = self.succeed("limits", "--ranks", "2")
        for word in ["memcpy", "read and written", "flag", "spinning", "sleeping", "barrier"]:
            self.assertIn(word, text)


if __name__ == "__main__":
    unittest.main()
