"""From a part's log and points to a record, and from records to the sections of the documents."""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"
sys.path.insert(0, str(SCRIPTS))

import render_results  # noqa: E402  (found by the line above)

BARS = json.loads((REPOSITORY / "bench/targets.json").read_text())
SHAPE = {"router_source": "made up", "replays": 50, "launches": 20, "p99_us": 1e4, "wire_bytes": 1e8,
         "wire_bytes_per_second": 2.5e11, "reduction": None, "host_us": None}


def row_of(where, time, floor=400.0):
    row = SHAPE | BARS["where"] | where | {"p50_us": time, "floor_us": floor, "of_floor": time / floor}
    if row["router"].startswith("synth"):
        row["router"] += ":experts=256,top_k=8,tokens=16384,layers=4,seed=1"
    return row


def record_of(rows, date="2026-11-22T10:00:00Z", part="bench-large"):
    push = [{"sms": 8, "bytes_per_second": 340e9}, {"sms": 132, "bytes_per_second": 330e9}]
    return {"commit": "0123456789abcdef", "changed": False, "date": date, "part": part, "machine": {"gpus": ["GPU"] * 4},
            "measured": {"schema": "ferry.bench.cuda", "schema_version": 2, "limits": [{"push": push}], "rows": rows}}


def line_of(section, name):
    lines = [line for line in section.splitlines() if line.startswith(f"| {name} |")]
    assert len(lines) == 1, (name, section)
    return [text.strip() for text in lines[0].strip("|").split("|")]


class SectionsTest(unittest.TestCase):
    def sections(self, *records):
        return render_results.sections_of(list(records), BARS)

    def test_a_bar_is_reached_up_to_its_factor(self):
        where = {"tokens": 4096, "work": "dispatch"}
        for time, verdict in ((439.9, "reached"), (440.0, "reached"), (440.1, "missed")):
            line = line_of(self.sections(record_of([row_of(where, time)]))["bars"], "4,096, dispatch bf16")
            self.assertEqual(line[1], "1.1 x floor")
            self.assertEqual(line[3], "400 us")
            self.assertEqual(line[4], "1.10")
            self.assertEqual(line[5], verdict)

    def test_bars_in_time_and_of_the_host(self):
        rows = [row_of({"tokens": 1, "work": "dispatch"}, 8.5, 3), row_of({"tokens": 128, "work": "dispatch", "launch": "eager",
                                                                          "host_us": 4.5}, 60)]
        bars = self.sections(record_of(rows))["bars"]
        self.assertEqual(line_of(bars, "1 token, dispatch")[1:], ["8 us", "8.5 us", "3.0 us", "2.83", "missed"])
        self.assertEqual(line_of(bars, "128, eager dispatch, time of the host")[1:], ["5 us", "4.5 us", "", "", "reached"])

    def test_what_is_not_measured_says_so(self):
        bars = self.sections(record_of([row_of({"tokens": 1, "work": "dispatch"}, 7.0)]))["bars"]
        self.assertIn(f"1 of {len(BARS['bars'])} reached, 0 missed, {len(BARS['bars']) - 1} not measured.", bars)
        self.assertEqual(line_of(bars, "128, dispatch fp8")[-1], "not measured")

    def test_the_headlines_are_some_of_the_bars(self):
        sections = self.sections(record_of([row_of({"tokens": 1, "work": "dispatch"}, 7.0)]))
        self.assertEqual(line_of(sections["headlines"], "1 token, dispatch"), line_of(sections["bars"], "1 token, dispatch"))
        self.assertLess(len(sections["headlines"].splitlines()), len(sections["bars"].splitlines()))

    def test_points_of_two_ranks_have_a_table_of_their_own(self):
        rows = [row_of({"tokens": 1, "work": "dispatch"}, 7.0), row_of({"tokens": 128, "work": "dispatch", "ranks": 2}, 440.0)]
        section = self.sections(record_of(rows))["two_ranks"]
        self.assertEqual(line_of(section, "128, dispatch bf16")[1:], ["440 us", "400 us", "1.10"])
        self.assertNotIn("1 token", section)

    def test_rows_that_were_skipped_or_differ_do_not_count(self):
        where = {"tokens": 128, "work": "dispatch"}
        for other in ({"skipped": "no library"}, {"sm_limit": 8}, {"hidden": 4096}, {"ranks": 2}, {"format": "fp8-columns"},
                      {"weights": False}, {"router": "synth:uniform-grouped"}):
            bars = self.sections(record_of([row_of(where | other, 20.0)]))["bars"]
            self.assertEqual(line_of(bars, "128, dispatch bf16")[-1], "not measured", other)

    def test_the_newest_record_counts(self):
        where = {"tokens": 128, "work": "dispatch"}
        records = [record_of([row_of(where, time)], f"2026-11-{day}T10:00:00Z") for day, time in ((22, 30.0), (24, 20.0), (23, 40.0))]
        random.shuffle(records)
        sections = self.sections(*records)
        self.assertEqual(line_of(sections["bars"], "128, dispatch bf16")[2], "20.0 us")
        self.assertIn("2026-11-24", sections["sources"])
        self.assertNotIn("2026-11-22", sections["sources"])

    def test_other_records_are_left_alone(self):
        old = record_of([row_of({"tokens": 128, "work": "dispatch"}, 20.0)])
        old["measured"]["schema_version"] = 1
        sections = self.sections(old, {"commit": "1", "date": "2026-11-22T10:00:00Z", "part": "test"})
        self.assertEqual(sections["sources"], "No results are committed.\n")
        self.assertEqual(sections["sweep"], "Not measured.\n")

    def test_sweep_and_baseline(self):
        rows = [row_of({"tokens": 4096, "work": "dispatch"}, 440.0),
                row_of({"tokens": 4096, "work": "combine", "reduction": "partial"}, 480.0),
                row_of({"tokens": 4096, "work": "nccl", "launch": "eager", "weights": False}, 1760.0),
                row_of({"tokens": 4096, "work": "nccl_rows", "weights": False}, 1100.0)]
        sections = self.sections(record_of(rows))
        self.assertEqual(line_of(sections["sweep"], "4,096")[1:], ["440 us, 250 GB/s, 1.10 x", "", "480 us, 250 GB/s, 1.20 x"])
        self.assertEqual(line_of(sections["baseline"], "4,096")[1:], ["440 us", "1,760 us", "1,100 us", "4.0, 2.5"])
        self.assertEqual(line_of(sections["sources"], "bench-large")[1:],
                         ["0123456", "2026-11-22", "4 x GPU", "340 GB/s with 8 SMs"])

    def test_every_bar_is_found_by_what_it_asks_for_and_by_nothing_else(self):
        for number, bar in enumerate(BARS["bars"]):
            row = row_of(bar["where"] | ({"host_us": 1.0} if "host_us" in bar else {}), 1.0, 100.0)
            verdicts = [line.split("|")[-2].strip() for line in self.sections(record_of([row]))["bars"].splitlines()[4:]]
            self.assertEqual([i for i, verdict in enumerate(verdicts) if verdict == "reached"], [number], bar["name"])


class DocumentsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "bench/results").mkdir(parents=True)
        (self.root / "docs").mkdir()
        (self.root / "bench/targets.json").write_text(json.dumps(BARS))
        (self.root / "bench/results/a.json").write_text(json.dumps(record_of([row_of({"tokens": 1, "work": "dispatch"}, 7.0)])))
        for name in render_results.FILES:
            (self.root / name).write_text("before\n<!-- results:bars -->\nold\n<!-- /results -->\nafter\n")

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "-B", SCRIPTS / "render_results.py", "--root", self.root, *arguments],
                              capture_output=True, text=True, check=False)

    def test_sections_are_replaced_and_nothing_else(self):
        self.assertNotEqual(self.run_script("--check").returncode, 0)
        self.assertEqual(self.run_script().returncode, 0)
        text = (self.root / "README.md").read_text()
        self.assertTrue(text.startswith("before\n<!-- results:bars -->\n") and text.endswith("<!-- /results -->\nafter\n"))
        self.assertNotIn("old", text)
        self.assertEqual(line_of(text, "1 token, dispatch")[-1], "reached")
        self.assertEqual(self.run_script("--check").returncode, 0)

    def test_a_figure_that_was_edited_is_found(self):
        self.run_script()
        path = self.root / "docs/performance.md"
        path.write_text(path.read_text().replace("7.0 us", "6.0 us"))
        done = self.run_script("--check")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("7.0 us", done.stdout)

    def test_an_unknown_section_is_refused(self):
        (self.root / "README.md").write_text("<!-- results:nothing -->\n<!-- /results -->\n")
        self.assertIn("nothing", self.run_script().stderr)


class RecordTest(unittest.TestCase):
    def record(self, log, points=None, status=0):
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: pathlib.Path(folder, name) for name in ("log", "points", "to")}
            paths["log"].write_text(log)
            if points is not None:
                paths["points"].write_text(json.dumps(points))
            done = subprocess.run(
                [sys.executable, "-B", SCRIPTS / "gpu_record.py", "--part", "bench-small", "--log", paths["log"], "--status",
                 str(status), "--seconds", "12", "--memory", "both", "--filter", "", "--to", paths["to"], "--points",
                 paths["points"]], cwd=REPOSITORY, capture_output=True, text=True, check=False)
            return done.returncode, json.loads(paths["to"].read_text())

    def test_points_come_with_commit_date_and_machine(self):
        points = record_of([])["measured"]
        code, record = self.record("", points)
        self.assertEqual(code, 0)
        self.assertEqual(record["measured"], points)
        for key in ("commit", "changed", "date", "machine", "part", "settings", "exit_code", "seconds"):
            self.assertIn(key, record)
        self.assertTrue(render_results.is_of_bench(record))

    def test_tests_are_counted_and_one_that_did_not_end_failed(self):
        log = "\n".join(["FERRY_SEED=7", "[ RUN      ] A.a", "[       OK ] A.a (1 ms)", "[ RUN      ] A.b",
                         "[  SKIPPED ] A.b (0 ms)", "[ RUN      ] A.c"])
        code, record = self.record(log, status=124)
        self.assertEqual(code, 0)
        self.assertEqual(record["tests"], {"passed": 1, "failed": 1, "skipped": 1, "failures": ["A.c did not end"]})
        self.assertEqual(record["settings"]["seeds"], ["7"])

    def test_only_skipped_tests_are_a_failure(self):
        code, _ = self.record("[ RUN      ] A.b\n[  SKIPPED ] A.b (0 ms)")
        self.assertNotEqual(code, 0)


if __name__ == "__main__":
    unittest.main()
