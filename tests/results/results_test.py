"""scripts/gpu_record.py, from a log to a record; scripts/render_results.py and plot_results.py, from records to the documents."""

import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"
sys.path.insert(0, str(SCRIPTS))

import render_results  # noqa: E402  (found by the line above)

TARGETS = json.loads((REPOSITORY / "bench/targets.json").read_text())
SHAPE = {"router_source": "made up", "replays": 50, "launches": 20, "p99_us": 1e4, "wire_bytes": 1e8,
         "wire_bytes_per_second": 2.5e11, "reduction": None, "host_us": None}


def row_of(where, time, bound=400.0):
    row = SHAPE | TARGETS["where"] | where | {"p50_us": time, "lower_bound_us": bound, "ratio_to_lower_bound": time / bound}
    if row["router"].startswith("synth"):
        row["router"] += ":experts=256,top_k=8,tokens=16384,layers=4,seed=1"
    return row


def record_of(rows, date="2026-11-22T10:00:00Z", part="bench-large"):
    push = [{"sms": 8, "bytes_per_second": 340e9}, {"sms": 132, "bytes_per_second": 330e9}]
    return {"commit": "0123456789abcdef", "changed": False, "date": date, "part": part, "machine": {"gpus": ["GPU"] * 4},
            "measured": {"schema": "ferry.bench.cuda", "schema_version": 3, "limits": [{"push": push}], "rows": rows}}


def line_of(table, name):
    lines = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    assert len(lines) == 1, (name, table)
    return [text.strip() for text in lines[0].strip("|").split("|")]


class TablesTest(unittest.TestCase):
    def tables(self, *records):
        return render_results.tables_of(list(records), TARGETS)

    def test_a_target_is_reached_up_to_its_ratio(self):
        where = {"tokens": 4096, "work": "dispatch"}
        for time, verdict in ((439.9, "reached"), (440.0, "reached"), (440.1, "missed")):
            line = line_of(self.tables(record_of([row_of(where, time)]))["bars"], "4,096 tokens, dispatch bf16")
            self.assertEqual(line[1], "1.1 x lower bound")
            self.assertEqual(line[3], "400 us")
            self.assertEqual(line[4], "1.10")
            self.assertEqual(line[5], verdict)

    def test_targets_for_times_and_for_the_calling_thread(self):
        rows = [row_of({"tokens": 1, "work": "dispatch"}, 8.5, 3), row_of({"tokens": 128, "work": "dispatch", "launch": "eager",
                                                                          "host_us": 4.5}, 60)]
        table = self.tables(record_of(rows))["bars"]
        self.assertEqual(line_of(table, "1 token, dispatch")[1:], ["8 us", "8.5 us", "3.0 us", "2.83", "missed"])
        self.assertEqual(line_of(table, "128 tokens, eager dispatch, time of the calling thread")[1:], ["5 us", "4.5 us", "", "", "reached"])

    def test_unmeasured_targets_say_so(self):
        table = self.tables(record_of([row_of({"tokens": 1, "work": "dispatch"}, 7.0)]))["bars"]
        self.assertIn(f"1 of {len(TARGETS['targets'])} targets reached, 0 missed, {len(TARGETS['targets']) - 1} not measured.", table)
        self.assertEqual(line_of(table, "128 tokens, dispatch fp8")[-1], "not measured")

    def test_two_ranks_have_a_table_of_their_own(self):
        rows = [row_of({"tokens": 1, "work": "dispatch"}, 7.0), row_of({"tokens": 128, "work": "dispatch", "ranks": 2}, 440.0)]
        table = self.tables(record_of(rows))["two_ranks"]
        self.assertEqual(line_of(table, "128 tokens, dispatch bf16")[1:], ["440 us", "400 us", "1.10"])
        self.assertNotIn("1 token", table)

    def test_skipped_and_other_rows_do_not_count(self):
        where = {"tokens": 128, "work": "dispatch"}
        for other in ({"skipped": "no library"}, {"sm_limit": 8}, {"hidden": 4096}, {"ranks": 2}, {"format": "fp8-columns"},
                      {"weights": False}, {"router": "synth:uniform-grouped"}):
            table = self.tables(record_of([row_of(where | other, 20.0)]))["bars"]
            self.assertEqual(line_of(table, "128 tokens, dispatch bf16")[-1], "not measured", other)

    def test_the_newest_record_counts(self):
        where = {"tokens": 128, "work": "dispatch"}
        records = [record_of([row_of(where, time)], f"2026-11-{day}T10:00:00Z") for day, time in ((22, 30.0), (24, 20.0), (23, 40.0))]
        random.shuffle(records)
        tables = self.tables(*records)
        self.assertEqual(line_of(tables["bars"], "128 tokens, dispatch bf16")[2], "20.0 us")
        self.assertIn("2026-11-24", tables["sources"])
        self.assertNotIn("2026-11-22", tables["sources"])

    def test_other_records_are_ignored(self):
        old = record_of([row_of({"tokens": 128, "work": "dispatch"}, 20.0)])
        old["measured"]["schema_version"] = 1
        tables = self.tables(old, {"commit": "1", "date": "2026-11-22T10:00:00Z", "part": "test"})
        self.assertEqual(tables["sources"], "No results are committed.\n")
        self.assertEqual(tables["sweep"], "Not measured.\n")

    def test_records_of_version_2_are_read_by_their_old_names(self):
        where = {"tokens": 128, "work": "dispatch", "form": "phases"}
        new = record_of([row_of(where, 500.0)])
        old = json.loads(json.dumps(new).replace("ratio_to_lower_bound", "of_floor").replace("lower_bound_us", "floor_us")
                         .replace('"phases"', '"halves"'))
        old["measured"]["schema_version"] = 2
        rows = [render_results.Results([record]).find(where) for record in (old, new)]
        self.assertEqual(rows[0], rows[1])
        self.assertEqual(rows[0]["ratio_to_lower_bound"], 1.25)

    def test_sweep_and_baseline(self):
        rows = [row_of({"tokens": 4096, "work": "dispatch"}, 440.0),
                row_of({"tokens": 4096, "work": "combine", "reduction": "partial"}, 480.0),
                row_of({"tokens": 4096, "work": "nccl", "launch": "eager", "weights": False}, 1760.0),
                row_of({"tokens": 4096, "work": "nccl_rows", "weights": False}, 1100.0)]
        tables = self.tables(record_of(rows))
        self.assertEqual(line_of(tables["sweep"], "4,096")[1:], ["440 us, 250 GB/s, 1.10 x", "", "480 us, 250 GB/s, 1.20 x"])
        self.assertEqual(line_of(tables["baseline"], "4,096")[1:], ["440 us", "1,760 us", "1,100 us", "4.0, 2.5"])
        self.assertEqual(line_of(tables["sources"], "bench-large")[1:],
                         ["0123456", "2026-11-22", "4 x GPU", "340 GB/s with 8 SMs"])

    def test_readme_has_the_targets_that_say_so(self):
        names = [target["name"] for target in TARGETS["targets"] if target.get("readme")]
        lines = self.tables(record_of([row_of({"tokens": 1, "work": "dispatch"}, 9.0)]))["readme"].splitlines()[2:]
        self.assertEqual([line.split("|")[1].strip() for line in lines], names)
        self.assertEqual(line_of("\n".join(lines), "1 token, dispatch")[-1], "missed")

    def test_formats_on_two_and_four_gpus(self):
        rows = [row_of({"tokens": 4096, "work": "dispatch", "format": "mxfp4", "ranks": 2}, 123.4),
                row_of({"tokens": 128, "work": "dispatch", "format": "mxfp4"}, 16.55)]
        self.assertEqual(line_of(self.tables(record_of(rows))["formats"], "mxfp4")[1:], ["123 us", "", "", "16.6 us"])

    def test_calls_from_python(self):
        def record(ranks, graph, date="2026-11-22T10:00:00Z"):
            row = {"mode": "normal", "call": "a call", "tokens": 4096, "host_filled_us": 10.0, "whole_filled_us": 500.0, "graph_us": graph}
            times = {f"{call}{kind}": {"python": ranks + 1.0, "cpp": ranks} for call in ("dispatch", "combine") for kind in ("", ", operator", ", recorded")}
            return {"commit": f"{ranks}" * 12, "date": date, "python_calls_us": times,
                    "measured": {"schema": "ferry.bench.deep_ep", "schema_version": 2, "backend": "cuda", "ranks": ranks, "rows": [row]}}

        tables = self.tables(record(4, None), record(4, 400.0, "2026-11-23T10:00:00Z"), record(2, 200.0))
        self.assertEqual(line_of(tables["calls"], "4,096, normal")[1:], ["a call", "10.0 us", "500 us", "400 us", "200 us"])
        self.assertIn("Four GPUs: 4444444, 2026-11-23; two GPUs: 2222222, 2026-11-22.\n", tables["calls"])
        self.assertEqual(line_of(tables["threads"], "`ferry.torch`")[1:], ["5.0 us", "5.0 us", "3.0 us", "3.0 us"])
        self.assertEqual(line_of(tables["threads"], "the same calls from C++")[1:], ["4.0 us", "4.0 us", "2.0 us", "2.0 us"])
        self.assertEqual(self.tables(record(4, 1.0))["calls"], "Not measured.\n")

    def test_calls_beside_deep_ep(self):
        rows = [{"mode": "low latency", "tokens": 128, "sm_limit": 0, "call": "combine", "deep_ep_us": 30.0, "ferry_us": 20.0, "readme": True},
                {"mode": "normal", "tokens": 4096, "sm_limit": 24, "call": "layout", "deep_ep_us": 150.0, "ferry_us": 100.0}]
        record = {"commit": "0", "date": "2026-11-28", "measured": {"schema": "ferry.beside_deep_ep", "schema_version": 1, "rows": rows}}
        tables = self.tables(record)
        self.assertEqual(line_of(tables["beside"], "4,096, normal, 24 SMs")[1:], ["layout", "150 us", "100 us", "1.50"])
        self.assertEqual(line_of(tables["beside_readme"], "128, low latency")[1:], ["combine", "30.0 us", "20.0 us", "1.50"])
        self.assertNotIn("layout", tables["beside_readme"])

    def test_every_target_matches_its_own_rows_only(self):
        for number, target in enumerate(TARGETS["targets"]):
            row = row_of(target["where"] | ({"host_us": 1.0} if "host_us" in target else {}), 1.0, 100.0)
            verdicts = [line.split("|")[-2].strip() for line in self.tables(record_of([row]))["bars"].splitlines()[4:]]
            self.assertEqual([i for i, verdict in enumerate(verdicts) if verdict == "reached"], [number], target["name"])


class PlotTest(unittest.TestCase):
    """Of the records of this repository, in a copy."""

    FILES = ("README.md", "docs/speed.svg", "tools/ferry/bench/readme_figures.inc")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "bench/results").mkdir(parents=True)
        for path in (REPOSITORY / "bench/results").glob("*.json"):
            shutil.copy(path, self.root / "bench/results")
        for name in self.FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "-B", SCRIPTS / "plot_results.py", "--root", self.root, *arguments],
                              capture_output=True, text=True, check=False)

    def test_check_finds_a_changed_digit(self):
        self.assertEqual(self.run_script("--check").returncode, 0)
        for name, number in (("README.md", r"(?<=dispatch bf16 1\.)\d"), ("docs/speed.svg", r"(?<=cx=\")\d"), (self.FILES[2], r"(?<=\.value = )\d")):
            path = self.root / name
            text = path.read_text()
            path.write_text(re.sub(number, lambda match: str((int(match[0]) + 1) % 10), text, count=1))
            done = self.run_script("--check")
            self.assertNotEqual(done.returncode, 0, name)
            self.assertIn(f"{name} is not what bench/results makes", done.stderr)
            self.assertEqual(self.run_script().returncode, 0)
            self.assertEqual(path.read_text(), text)

    def test_a_missing_record_of_cpus_is_named(self):
        for path in (self.root / "bench/results").glob("*.json"):
            if json.loads(path.read_text()).get("schema") == "ferry.bench":
                path.unlink()
        self.assertIn("no record in bench/results", self.run_script("--check").stderr)


class DocumentsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "bench/results").mkdir(parents=True)
        (self.root / "docs").mkdir()
        (self.root / "bench/targets.json").write_text(json.dumps(TARGETS))
        (self.root / "bench/results/a.json").write_text(json.dumps(record_of([row_of({"tokens": 1, "work": "dispatch"}, 7.0)])))
        for name in ("README.md", "docs/performance.md"):
            (self.root / name).write_text("before\n<!-- results:bars -->\nold\n<!-- /results -->\nafter\n")

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "-B", SCRIPTS / "render_results.py", "--root", self.root, *arguments],
                              capture_output=True, text=True, check=False)

    def test_only_the_tables_are_replaced(self):
        self.assertNotEqual(self.run_script("--check").returncode, 0)
        self.assertEqual(self.run_script().returncode, 0)
        text = (self.root / "README.md").read_text()
        self.assertTrue(text.startswith("before\n<!-- results:bars -->\n") and text.endswith("<!-- /results -->\nafter\n"))
        self.assertNotIn("old", text)
        self.assertEqual(line_of(text, "1 token, dispatch")[-1], "reached")
        self.assertEqual(self.run_script("--check").returncode, 0)

    def test_an_edited_figure_is_found(self):
        self.run_script()
        path = self.root / "docs/performance.md"
        path.write_text(path.read_text().replace("7.0 us", "6.0 us"))
        done = self.run_script("--check")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("7.0 us", done.stdout)

    def test_an_unknown_table_is_refused(self):
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

    def test_a_record_has_commit_date_and_machine(self):
        points = record_of([])["measured"]
        code, record = self.record("", points)
        self.assertEqual(code, 0)
        self.assertEqual(record["measured"], points)
        for key in ("commit", "changed", "kernels", "date", "machine", "part", "settings", "exit_code", "seconds"):
            self.assertIn(key, record)
        self.assertTrue(render_results.is_bench(record))

    def test_a_test_that_did_not_end_counts_as_failed(self):
        log = "\n".join(["FERRY_SEED=7", "[ RUN      ] A.a", "[       OK ] A.a (1 ms)", "[ RUN      ] A.b",
                         "[  SKIPPED ] A.b (0 ms)", "[ RUN      ] A.c"])
        code, record = self.record(log, status=124)
        self.assertEqual(code, 0)
        self.assertEqual(record["tests"], {"passed": 1, "failed": 1, "skipped": 1, "failures": ["A.c did not end"],
                                           "names": {"passed": {"A": ["a"]}, "skipped": {"A": ["b"]}}, "instances": {}})
        self.assertEqual(record["settings"]["seeds"], ["7"])

    def test_the_worst_of_several_repetitions_counts(self):
        log = "\n".join(f"[ RUN      ] A.{name}\n[ {outcome:>8} ] A.{name} (1 ms)" for name, outcome in
                        [("a", "OK"), ("a", "FAILED"), ("a", "OK"), ("b", "SKIPPED"), ("b", "OK")])
        tests = self.record(log)[1]["tests"]
        self.assertEqual((tests["failures"], tests["names"]["passed"]), (["A.a"], {"A": ["b"]}))

    def test_programs_and_python_tests_have_names(self):
        log = "\n".join(["[ RUN      ] cli_gpu", "[       OK ] cli_gpu (1000 ms)",
                         "python/tests/core/test_group.py::test_a[two words] PASSED [ 50%]",
                         "python/tests/core/test_group.py::test_b SKIPPED (no MPI) [100%]", "FAILED python/tests/x.py::test_a"])
        names = self.record(log)[1]["tests"]["names"]
        self.assertEqual(names["passed"], {"cli_gpu": [""], "python_group": ["test_a[two words]"]})
        self.assertEqual(names["skipped"], {"python_group": ["test_b"]})

    def test_a_python_test_that_did_not_end_counts_as_failed(self):
        log = "\n".join(["python/tests/core/test_group.py::test_a PASSED [ 50%]", "a warning", "python/tests/core/test_group.py::test_b[x y] "])
        tests = self.record(log, status=124)[1]["tests"]
        self.assertEqual((tests["failures"], tests["names"]["passed"]), (["python_group.test_b[x y] did not end"], {"python_group": ["test_a"]}))

    def test_the_number_of_parameters_is_recorded(self):
        listed = ["P/Suite.", "  a/One  # GetParam() = 1", "  a/Two  # GetParam() = 2", "  b/One", "Other.", "  c/0", "  c/1"]
        log = "\n".join(2 * [*listed, "[ RUN      ] P/Suite.a/One", "[       OK ] P/Suite.a/One (1 ms)"])
        self.assertEqual(self.record(log)[1]["tests"]["instances"], {"P/Suite.a": 2})

    def test_skipping_every_test_is_a_failure(self):
        code, _ = self.record("[ RUN      ] A.b\n[  SKIPPED ] A.b (0 ms)")
        self.assertNotEqual(code, 0)


if __name__ == "__main__":
    unittest.main()
