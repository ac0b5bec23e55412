"""The outputs of the commands: table, JSON, page and timeline; how files are replaced; progress on a terminal and in a log."""

import collections
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from program import BLOCK_FORMATS, FORMATS, LAYOUTS, PROGRAM, PROGRESS, SMALL, TILED, ProgramTest, ferry

CHECK_PAGE = os.environ["FERRY_CHECK_PAGE"]
NO_BROWSER = 77
VERSION = r"\A\d+\.\d+\.\d+\Z"


def require_page(test, *pages_and_reports):
    """Requires that each page, as Chromium draws it, shows every value of the report behind it."""
    done = subprocess.run([sys.executable, CHECK_PAGE, *pages_and_reports], text=True, capture_output=True, check=False)
    if done.returncode == NO_BROWSER and os.environ.get("CI") != "true":
        test.skipTest("no Chromium here")
    test.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class ReportTest(ProgramTest):
    """One run that writes all of its outputs at once."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.json, cls.page, cls.timeline = (os.path.join(folder.name, name) for name in ["run.json", "run.html", "run.trace.json"])
        done = ferry("run", *SMALL, "--json", cls.json, "--html", cls.page, "--timeline", cls.timeline)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        cls.table = done.stdout
        with open(cls.json, encoding="utf-8") as file:
            cls.run_report = json.load(file)

    def test_table_agrees_with_json(self):
        run, table = self.run_report, self.table
        for check in run["checks"]["list"]:
            self.assertIn(f"{check['name']}: {check['compared']:,} compared, {check['wrong']:,} wrong", table)
        rows = run["load"]["rows_per_rank"]
        for rank, count in enumerate(rows):
            self.assertRegex(table, rf"(?m)^rank {rank} +{count:,} ")
        busiest = max(range(len(rows)), key=lambda rank: (rows[rank], -rank))
        self.assertIn(f"Busiest   rank {busiest}:", table)
        self.assertIn("\n          6 of 6 checks passed\n", table)
        self.assertIn("synthesised, seed 1", table)
        self.assertIn(run["workload"]["recipe"], table)
        self.assertNotIn("docs/traces.md", table)  # a trace was named

    def test_the_files_written_are_named(self):
        self.assertTrue(self.table.endswith(f"Wrote     {self.json}\n          {self.page}\n          {self.timeline}\n"))

    def test_json_is_consistent(self):
        run = self.run_report
        ranks = range(run["configuration"]["ranks"])
        for direction in ["dispatch", "combine"]:
            traffic = run[direction]["traffic_bytes"]
            wire = sum(traffic[a][b] for a in ranks for b in ranks if a != b)
            self.assertEqual(wire, run[direction]["wire_bytes"])
        self.assertEqual(sum(run["load"]["rows_per_rank"]), sum(run["load"]["routes_per_expert"]))
        self.assertEqual(sum(run["load"]["routes_per_expert"]), 2 * 3 * 5 * 4)  # steps, ranks, tokens, top-k
        self.assertIn("--hidden 128", run["command"])

    def test_schema(self):
        self.assertEqual((self.run_report["schema"], self.run_report["schema_version"]), ("ferry.run", 2))
        self.assertRegex(self.run_report["ferry_version"], VERSION)

    def test_page(self):
        require_page(self, self.page, self.json)

    def test_page_of_every_format(self):
        files = []
        for layout, form in zip(itertools.cycle(LAYOUTS[:2]), [*FORMATS, *BLOCK_FORMATS, *TILED]):
            page, report = self.path(f"{form}.html"), self.path(f"{form}.json")
            with self.subTest(format=form):
                table = self.succeed("run", *SMALL, "--format", form, "--layout", layout, "--html", page, "--json", report)
                self.assertIn(f"{layout}, {form}; combine", table)
                files += [page, report]
        require_page(self, *files)

    def test_timeline(self):
        with open(self.timeline, encoding="utf-8") as file:
            trace = json.load(file)
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        threads = collections.Counter((event["pid"], event["tid"]) for event in spans)
        self.assertEqual(threads, {(rank, stage): 2 for rank in range(3) for stage in range(3)})
        self.assertTrue(all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans))
        for thread in threads:
            own = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == thread)
            self.assertLessEqual(own[0][0] + own[0][1], own[1][0])  # one after the other


class PageOfNodesTest(ProgramTest):
    """The run itself compares the bytes that the exchange has counted, those between nodes apart, with the matrices."""

    def test_the_matrix_by_nodes_shows_the_counted_bytes(self):
        for hops, level in [("one", "rank"), ("two", "node")]:
            with self.subTest(hops=hops):
                report, page = self.path(f"{hops}.json"), self.path(f"{hops}.html")
                self.succeed("run", *SMALL, "--ranks", 6, "--hosts", 3, "--hops", hops, "--reduction-level", level,
                             "--format", "fp32", "--json", report, "--html", page)
                with open(report, encoding="utf-8") as file:
                    run = json.load(file)
                checks = {check["name"]: check["passed"] for check in run["checks"]["list"]}
                require_page(self, page, report)
                for direction in ["dispatch", "combine"]:
                    self.assertTrue(checks[f"{direction} bytes as planned"])
                    matrix, of_ranks = run[direction]["node_traffic_bytes"], run[direction]["traffic_bytes"]
                    for a, b in itertools.product(range(3), repeat=2):
                        pairs = itertools.product((2 * a, 2 * a + 1), (2 * b, 2 * b + 1))
                        self.assertEqual(matrix[a][b], sum(of_ranks[i][j] for i, j in pairs))
                    between = sum(matrix[a][b] for a, b in itertools.permutations(range(3), 2))
                    self.assertEqual(run[direction]["between_nodes_bytes"], between)
                    self.assertGreater(between, 0)


class OutputsTest(ProgramTest):
    def test_outputs_replace_longer_files(self):
        path = self.path("run.json")
        with open(path, "w", encoding="ascii") as file:
            file.write("x" * 1_000_000)
        text = self.succeed("run", *SMALL, "--json", path)
        self.assertTrue(text.endswith(f"\nWrote     {path}, replacing an older file\n"), text)
        with open(path, encoding="utf-8") as file:
            json.load(file)

    def test_an_interrupted_command_leaves_no_files(self):
        before = self.path("before.json")
        with open(before, "w", encoding="ascii") as file:
            file.write("before")
        arguments = ["run", *SMALL, "--steps", "100000", "--json", before, "--html", self.path("new.html")]
        process = subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(), -signal.SIGINT)
        self.assertEqual(os.listdir(self.folder), ["before.json"])
        with open(before, encoding="ascii") as file:
            self.assertEqual(file.read(), "before")

    def test_outputs_go_where_links_lead_and_keep_permissions(self):
        target, link = self.path("target.json"), self.path("link.json")
        with open(target, "w", encoding="ascii") as file:
            file.write("before")
        os.chmod(target, 0o640)
        os.symlink(target, link)
        self.succeed("run", *SMALL, "--json", link, "--html", "/dev/null")
        self.assertTrue(os.path.islink(link))
        with open(target, encoding="utf-8") as file:
            json.load(file)
        self.assertEqual(os.stat(target).st_mode & 0o777, 0o640)
        self.assertEqual(sorted(os.listdir(self.folder)), ["link.json", "target.json"])

    def test_links_in_a_shared_folder_are_not_followed(self):
        theirs = pathlib.Path(self.path("theirs"))
        theirs.write_text("kept", encoding="utf-8")
        # exec keeps the process number, which anybody can guess.
        planted = 'ln -s theirs "$1.$$.part"; ln -s theirs "$1.part"; ln -s theirs "$1.tmp"; path=$1; shift; exec "$0" "$@" --json "$path"'
        subprocess.run(["sh", "-c", planted, PROGRAM, self.path("run.json"), "run", *SMALL], cwd=self.folder, capture_output=True, check=True)
        self.assertEqual(theirs.read_text(encoding="utf-8"), "kept")
        json.loads(pathlib.Path(self.path("run.json")).read_text(encoding="utf-8"))

    def test_any_output_to_stdout_replaces_the_table(self):
        self.assertTrue(self.succeed("run", *SMALL, "--html", "-").startswith("<!doctype html>"))
        self.assertIn("traceEvents", json.loads(self.succeed("run", *SMALL, "--timeline", "-")))

    def test_refused_run_leaves_files_alone(self):
        path = self.path("run.json")
        with open(path, "w", encoding="ascii") as file:
            file.write("before")
        self.refuse(2, ["7 bf16"], "run", "--hidden", "7", "--json", path)
        with open(path, encoding="ascii") as file:
            self.assertEqual(file.read(), "before")

    def test_doctor_says_how_to_get_traces_and_a_run_does_not(self):
        fallback = [word for word in SMALL if not word.startswith("synth:") and word != "--trace"]
        self.assertNotIn("docs/traces.md", self.succeed("run", *fallback))
        self.assertIn("docs/traces.md", self.succeed("doctor"))

    def test_a_folder_without_traces_is_reported(self):
        fallback = [word for word in SMALL if not word.startswith("synth:") and word != "--trace"]
        os.mkdir(self.path("empty"))
        for folder, word in [("none", "No such file"), ("empty", ".ids.npy")]:
            done = ferry("run", *fallback, environment={"FERRY_TRACES": self.path(folder)})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stderr, r"\Aferry: note: FERRY_TRACES [^\n]+\n\Z")
            for expected in [self.path(folder), word, "synthesised"]:
                self.assertIn(expected, done.stderr)
            self.assertIn("synthesised, seed 1", done.stdout)

    def test_schemas(self):
        trace = "synth:uniform:experts=8,top_k=2,tokens=8,layers=1"
        bench = ["--trace", "synth:uniform", "--tokens", "1", "--hidden", "64", "--experts", "8", "--top-k", "2", "--repetitions", "1"]
        for schema, version, arguments in [("ferry.trace", 1, ["trace", "info", trace]), ("ferry.bench", 2, ["bench", *bench])]:
            document = json.loads(self.succeed(*arguments, "--json", "-"))
            self.assertEqual((document["schema"], document["schema_version"]), (schema, version))
            self.assertRegex(document["ferry_version"], VERSION)

    def test_singular(self):
        table = self.succeed("run", "--ranks", "1", "--steps", "1", "--tokens", "1", "--hidden", "64", "--trace",
                             "synth:uniform:experts=64,top_k=1,tokens=1,layers=1")
        for text in ["1 layer of 1 token; 1 step of 1 token per rank", "1 rank (threads)", "memcpy by 1 thread:",
                     "the mean of 0.02 routes"]:
            self.assertIn(text, table)
        text = self.succeed("trace", "info", "synth:uniform:experts=1,top_k=1,tokens=1,layers=1", "--ranks", "1")
        self.assertIn("1 layer of 1 token, 1 expert, top 1", text)
        self.assertIn("With 1 rank,", text)

    def test_progress_in_a_log(self):  # takes 2 s, as the first line does
        with subprocess.Popen([PROGRAM, "run", *SMALL, "--steps", "100000"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True) as process:
            line = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            self.assertRegex(line, r"\Aferry: checking, step: \d+ of 100000, about \d\d:\d\d:\d\d left\n\Z")
            self.assertRegex(line, PROGRESS)

    def test_progress_on_a_terminal(self):
        long_run = ["run", *SMALL, "--steps", "120", "--tokens", "32", "--hidden", "512"]
        terminal, other = os.openpty()
        done = subprocess.Popen([os.environ["FERRY_PROGRAM"], *long_run], stderr=other, stdout=subprocess.DEVNULL)
        os.close(other)
        output = b""
        while True:
            try:
                piece = os.read(terminal, 4096)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            output += piece
        os.close(terminal)
        self.assertEqual(done.wait(), 0)
        self.assertIn(b" of 120", output)


class OtherCommandsTest(ProgramTest):
    def test_doctor(self):
        text = self.succeed("doctor")
        for word in ["processor", "memory", "shared memory", "huge pages", "OpenBLAS", "MPI module", "NCCL", "engines", "GPUs",
                     "traces", "ok  cpu backend, threads", "ok  cpu backend, processes"]:
            self.assertIn(word, text)
        self.assertRegex(text, r"\Aferry \d+\.\d+\.\d+ can run here: on threads, on processes[^\n]*\n\nok  processor ")
        self.assertRegex(text, r"(?m)^    variables +none is set; ferry doctor --all lists all \d+$")
        self.assertRegex(self.succeed("doctor", environment={"FERRY_HOST_ID": "7", "FERRY_LOG": "0"}),
                         r"(?m)^    variables +FERRY_HOST_ID=7, FERRY_LOG=0; ")
        if not os.path.exists("/dev/nvidia0"):
            self.assertIn("; not: ", text.splitlines()[0])
            self.assertNotIn("ok  NCCL", text)
            self.assertNotRegex(text, r"(?m)^ok  engines .*nccl")

    def test_doctor_lists_the_variables_of_the_documentation(self):
        page = (pathlib.Path(__file__).parents[2] / "docs/environment.md").read_text(encoding="utf-8")
        text = self.succeed("doctor", "--all", environment={"FERRY_HOST_ID": "rack 7"})
        listed = re.findall(r"^    (FERRY_\w+) +(.+)\n +(.+)$", text, re.MULTILINE)
        documented = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
        self.assertEqual([(name, meaning) for name, _, meaning in listed], documented)
        self.assertEqual([value for _, value, _ in listed], ["rack 7"] + (len(documented) - 1) * ["not set"])

    def test_every_variable_that_the_sources_read_is_documented(self):
        root = pathlib.Path(__file__).parents[2]
        named = "".join((root / page).read_text(encoding="utf-8") for page in ("docs/environment.md", "tests/protocol/README.md"))
        reads = re.compile(r"""(?:getenv|environment_variable|paths_in|read_variable|environ(?:\.get)?)[(\[][^;\n]*?["'](\w+)["']""")
        found = set()
        for folder in ("src", "include", "tools", "python/src", "python/ferry"):
            for path in (root / folder).rglob("*"):
                if path.suffix in (".c", ".cpp", ".hpp", ".h", ".cu", ".cuh", ".py"):
                    found |= {name for name in reads.findall(path.read_text(encoding="utf-8")) if name.isupper()}
        self.assertLessEqual({"FERRY_JITTER", "FERRY_BLOCK_ROLES", "VIRTUAL_ENV"}, found)
        self.assertEqual({name for name in found if f"`{name}" not in named}, set())

    def test_one_function_reads_variables(self):
        root = pathlib.Path(__file__).parents[2]
        readers = [str(path.relative_to(root)) for folder in ("src", "tools", "python/src")
                   for path in (root / folder).rglob("*.c*") if re.search(r"getenv\(", path.read_text(encoding="utf-8"))]
        self.assertEqual(readers, ["src/base/environment.cpp"])

    @unittest.skipUnless(os.geteuid() == 0, "only root can give a file another user")
    def test_a_setuid_program_reads_no_variables(self):
        if os.statvfs(self.folder).f_flag & os.ST_NOSUID:
            self.skipTest("the folder of temporary files has no setuid bits")
        program = self.path("ferry")
        shutil.copy(PROGRAM, program)
        os.chmod(self.folder, 0o755)
        variables = {**os.environ, "FERRY_HOST_ID": "rack 7"}
        for setuid in False, True:
            if setuid:
                os.chown(program, 65534, 65534)
                os.chmod(program, 0o4755)
            text = subprocess.run([program, "doctor"], capture_output=True, text=True, check=False, env=variables).stdout
            self.assertEqual("rack 7" in text, not setuid, text)

    def test_names_the_documents_of_its_installation(self):
        for program, documents in [("wheel/ferry", "wheel/documents"), ("prefix/bin/ferry", "prefix/share/doc/ferry")]:
            with self.subTest(program=program):
                os.makedirs(os.path.join(self.path(documents), "docs"))
                os.makedirs(os.path.dirname(self.path(program)), exist_ok=True)
                shutil.copy(PROGRAM, self.path(program))
                environment = {name: value for name, value in os.environ.items() if name != "FERRY_TRACES"}
                done = subprocess.run([self.path(program), "doctor"], capture_output=True, text=True, check=True, env=environment)
                self.assertIn(f" {self.path(documents)}/docs/traces.md says how", done.stdout)
                self.assertRegex(done.stdout, rf"(?m)^ok  documents +{self.path(documents)}$")

    def test_doctor_names_what_is_missing(self):
        text = self.succeed("doctor", environment={"FERRY_SHM_DIR": self.path("none")})
        self.assertRegex(text, r"(?m)^--  shared memory .* does not exist$")
        self.assertRegex(text, r"(?m)^!!  cpu backend, processes .*none")
        self.assertRegex(text, r"\Aferry \S+ can run here: on threads[^\n]*; not: on processes")

    def test_doctor_tells_why_there_is_no_mpi_module(self):
        text = self.succeed("doctor", environment={"FERRY_MPI_MODULE": self.path("none")})
        found, advice = re.search(r"(?m)^--  MPI module +(.+)\n +(.+)$", text).groups()
        if os.environ["FERRY_MPI"] == "OFF":
            self.assertIn("left out of this build (FERRY_MPI=OFF)", found)
            self.assertIn("-D FERRY_MPI=ON", advice)
        else:
            self.assertRegex(found, "^(built, but not|no MPI was found)")
        self.assertIn("FERRY_MPI_MODULE", advice)

    def test_doctor_names_the_library_of_nvshmem(self):
        text = self.succeed("doctor", environment={"FERRY_NVSHMEM_MODULE": self.path("none")})
        self.assertRegex(text, r"(?m)^--  NVSHMEM +\S")
        if module := os.environ.get("NVSHMEM_MODULE_OF_THIS_BUILD"):
            text = self.succeed("doctor", environment={"FERRY_NVSHMEM_MODULE": module})
            self.assertRegex(text, r"(?m)^ok  NVSHMEM +3\.\d+\.\d+, /.*/libnvshmem_host\.so\.3$")

    def test_doctor_names_the_engines(self):
        with open(self.path("no_library"), "w") as file:
            file.write("text")
        modules = [(self.path("none"), "--", "custom"), (self.path("no_library"), "!!", "custom")]
        if os.environ.get("MPI_MODULE_OF_THIS_BUILD"):
            modules.append((os.environ["MPI_MODULE_OF_THIS_BUILD"], "ok", "custom, mpi"))
            modules.append(("", "ok", "custom, mpi"))  # programs of the build tree find it
        for module, state, engines in modules:
            text = self.succeed("doctor", environment={"FERRY_MPI_MODULE": module, "FERRY_NCCL_LIBRARY": self.path("none")})
            self.assertRegex(text, r"(?m)^--  NCCL +NCCL was not found: .*/none cannot be loaded")
            self.assertRegex(text, rf"(?m)^{state}  MPI module ")
            self.assertRegex(text, rf"(?m)^ok  engines +{engines}$")

    def test_limits(self):
        table = self.succeed("limits", "--ranks", "3", "--json", self.path("limits.json"))
        for word in ["memcpy", "read and written", "flag", "spinning", "sleeping", "barrier", "; load average "]:
            self.assertIn(word, table)
        self.assertIn("it sleeps until the writer wakes it", self.succeed("limits", "--help"))
        with open(self.path("limits.json"), encoding="utf-8") as file:
            limits = json.load(file)
        self.assertEqual((limits["schema"], limits["schema_version"]), ("ferry.limits", 1))
        self.assertRegex(limits["ferry_version"], VERSION)
        self.assertIn(3, [one["threads"] for one in limits["memcpy"]])
        self.assertTrue(all(one["bytes_per_second"] > 1e8 for one in limits["memcpy"]))
        rates = [one["bytes_per_second"] for one in limits["memcpy"]]  # of more and more threads
        slower = any(max(rates[:i]) > 1.25 * rates[i] for i in range(1, len(rates)))
        times = {(one["group"], one["waiting"]): one["seconds"] for one in limits["flag_one_way"]}
        sleepy = any(times[group, "spinning"] > times[group, "sleeping"] for group in ("threads", "processes"))
        self.assertEqual("Warning: figures disagree" in table, slower or sleepy and limits["machine"]["cores"] > 1, table)
        ways = {(one["group"], one["waiting"]) for one in limits["flag_one_way"]}
        self.assertEqual(len(ways), 4)
        self.assertEqual({(one["group"], one["ranks"]) for one in limits["barrier"]}, {("threads", 3), ("processes", 3)})
        for one in limits["flag_one_way"] + limits["barrier"]:
            self.assertTrue(0 < one["low"] <= one["seconds"] <= one["high"] < 1, one)
        for one in limits["memcpy"]:
            self.assertTrue(0 < one["low"] <= one["bytes_per_second"] <= one["high"], one)


if __name__ == "__main__":
    unittest.main()
