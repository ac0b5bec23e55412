"""scripts/gpu_tests.py: which records make the pages of capabilities say what."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from small_repository import REPOSITORY, SmallRepository  # first, because it finds the scripts

import gpu_tests
from kernel_sources import hash_of_kernels

SCRIPT = REPOSITORY / "scripts/gpu_tests.py"

FILES = {
    "src/backends/cuda/kernel.cu": "int a;\n",
    "scripts/gpu": "run_named() {\n  run_named cli_gpu python3\n",
    "python/tests/core/test_group.py": "",
    "tests/contract/rows_test.cpp": "TEST_P(Contract, Rows) {\nTEST_P(Contract, Sums) {\n",
    "tests/contract/suite.cpp": "INSTANTIATE_TEST_SUITE_P(CudaThreads, Contract, x);\nINSTANTIATE_TEST_SUITE_P(CudaProcesses, Contract,\n"
                               "INSTANTIATE_TEST_SUITE_P(CudaThreadsInTwoHops, Contract, x);\n",
    "tests/cuda/own_test.cpp": '#include "cuda/device_test.hpp"\nTEST_F(Own, Test) {\nTEST_P(Points, Test) {\n'
                               "INSTANTIATE_TEST_SUITE_P(All, Points, x);\nTEST(Own, Here) {\n",
    "docs/capabilities.md": "| area | what works | GPUs |\n|---|---|---|\n| Rows | rows | x |\n",
    "bench/results/tests/capabilities.md": """<!-- gpu-tests -->
<!-- /gpu-tests -->
## Rows
| # | capability | test | GPUs |
|---|---|---|---|
| 1 | rows | `Contract.Rows`, `Contract.Sums` | anything |
| 2 | own | `Own.Test`, `Points.Test` | |
| 3 | none | `Own.Here`, `Other.Test` | 2 GPUs |
| 4 | program | `cli_gpu`, `python_group` | |
| 5 | two hops | `CudaThreadsInTwoHops/Contract.Sums` | |
""",
}
THREADS = {"CudaThreads/Contract": ["Rows", "Sums"]}
PROCESSES = {"CudaProcesses/Contract": ["Rows", "Sums"]}
OWN = {"Own": ["Test"], "All/Points": ["Test/One", "Test/Two"]}


class GpuTestsTest(SmallRepository):
    FILES = FILES

    def setUp(self):
        super().setUp()
        self.day = 10

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "-B", SCRIPT, *arguments, "--root", self.root], capture_output=True, text=True, check=False)

    def keep(self, passed, part="test", gpus=2, commit="a" * 40, skipped=None, failures=(), kernels=None, exit_code=0):
        """Files a record of scripts/gpu, newer than the last."""
        self.day += 1
        tests = {"failures": list(failures), "names": {"passed": passed, "skipped": skipped or {}}, "instances": {"All/Points.Test": 2}}
        tests |= {outcome: 1 for outcome in gpu_tests.OUTCOMES}
        record = {"commit": commit, "changed": False, "kernels": kernels or hash_of_kernels(self.root),
                  "date": f"2026-11-{self.day}T10:00:00Z", "machine": {"gpus": ["NVIDIA H200"] * gpus, "driver": "1"}, "part": part,
                  "settings": {"memory": "both", "filter": "", "seeds": []}, "exit_code": exit_code, "seconds": 1, "tests": tests}
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / f"{part}.json").write_text(json.dumps(record))
            (pathlib.Path(folder) / f"{part}-points.json").write_text("[]")
            done = self.run_script("keep", folder)
        self.assertEqual(done.returncode, 0, done.stderr)

    def cells(self):
        text = (self.root / gpu_tests.DOCUMENT).read_text()
        return [line.split("|")[4].strip() for line in text[text.index("<!-- /gpu-tests"):].splitlines()[4:]]

    def summary(self):
        return (self.root / gpu_tests.SUMMARY).read_text().splitlines()[-1].split("|")[3].strip()

    def test_without_records_nothing_has_run(self):
        self.assertEqual(self.run_script("render").returncode, 0)
        self.assertEqual(self.cells(), ["not run", "not run", "", "not run", "not run"])

    def test_a_row_is_shown_by_records_of_today(self):
        self.keep(THREADS)
        self.keep(PROCESSES, "test-processes", gpus=4)
        self.keep(OWN, "test-cuda", gpus=1)
        self.keep({"cli_gpu": [""]}, "program")
        self.keep({"python_group": ["test_a"]}, "python", gpus=4)
        self.assertEqual(self.cells(), ["threads: 2 GPUs; processes: 4 GPUs", "1 GPU", "", "2 GPUs", "not run"])
        self.keep(THREADS, gpus=4)
        self.assertEqual(self.cells()[0], "4 GPUs")

    def test_another_instantiation_counts_for_rows_that_name_it(self):
        self.keep({"CudaThreadsInTwoHops/Contract": ["Rows/0", "Sums/0"]}, "two-hops")
        self.assertEqual(self.cells()[0], "not run")
        self.assertEqual(self.cells()[4], "2 GPUs")

    def test_older_kernels_are_named_by_their_commit(self):
        self.keep(OWN, commit="b" * 40)
        (self.root / "src/backends/cuda/kernel.cu").write_text("int b;\n")
        self.assertNotEqual(self.run_script("check").returncode, 0)  # the document claims what no record of today shows
        self.run_script("render")
        self.assertEqual(self.cells()[1], "2 GPUs at bbbbbbb")
        self.assertEqual(self.run_script("check").returncode, 0)
        self.keep(OWN, gpus=1)
        self.assertEqual(self.cells()[1], "1 GPU")

    def test_a_test_that_was_skipped_or_ran_in_part_has_not_run(self):
        self.keep({"Own": ["Test"], "All/Points": ["Test/One"]})
        self.assertEqual(self.cells()[1], "not run: `Points.Test`")
        self.keep({"All/Points": ["Test/One", "Test/Two"]}, "other", skipped={"Own": ["Test"]})
        self.assertEqual(self.cells()[1], "2 GPUs")  # of two parts, one ran it
        self.keep({}, "test", skipped={"Own": ["Test"]})
        self.assertEqual(self.cells()[1], "not run: `Own.Test`")

    def test_every_instantiation_of_a_test_counts(self):
        with (self.root / "tests/cuda/own_test.cpp").open("a") as file:
            file.write("INSTANTIATE_TEST_SUITE_P(More, Points, x);\n")
        self.keep(OWN)
        self.assertEqual(self.cells()[1], "not run: `Points.Test`")
        self.keep({"More/Points": ["Test/One"]}, "other")
        self.assertEqual(self.cells()[1], "2 GPUs")

    def test_a_failure_is_shown_until_the_test_passes(self):
        self.keep(OWN)
        self.keep({}, failures=["All/Points.Test/One did not end"], commit="b" * 40)
        self.assertEqual(self.cells()[1], "failed at bbbbbbb: `Points.Test`")
        self.keep({"All/Points": ["Test/Two"]}, commit="c" * 40)  # another instance, with the same kernels
        self.assertEqual(self.cells()[1], "failed at bbbbbbb: `Points.Test`")
        self.keep({"All/Points": ["Test/One", "Test/Two"]})
        self.assertEqual(self.cells()[1], "2 GPUs")

    def test_a_failure_with_older_kernels_is_shown(self):
        self.keep(OWN)
        self.keep({}, failures=["All/Points.Test/One"], commit="b" * 40)
        self.keep({}, "other", failures=["Own.Test"], commit="c" * 40, gpus=1)
        (self.root / "src/backends/cuda/kernel.cu").write_text("int b;\n")
        self.run_script("render")
        self.assertEqual(self.cells()[1], "failed at bbbbbbb: `Points.Test`; at ccccccc: `Own.Test`")
        self.keep({"All/Points": ["Test/One", "Test/Two"]}, gpus=4)  # on another machine, later
        self.assertEqual(self.cells()[1], "failed at ccccccc: `Own.Test`")
        self.keep({}, failures=["All/Points.Test/One"], commit="d" * 40, kernels="older")
        self.assertEqual(self.cells()[1], "failed at ccccccc: `Own.Test`; at ddddddd: `Points.Test`")
        self.keep(OWN)
        self.assertEqual(self.cells()[1], "2 GPUs")

    def test_a_failure_of_a_file_of_python_is_shown(self):
        self.keep({"python_group": ["test_a"]}, "python", failures=["python_group.test_b"], commit="b" * 40)
        self.keep({"python_group": ["test_a"]}, "python", kernels="older")
        self.assertEqual(self.cells()[3], "failed at bbbbbbb: `python_group`")
        self.keep({"python_group": ["test_b"], "cli_gpu": [""]}, "python")
        self.assertEqual(self.cells()[3], "2 GPUs")

    def test_a_failure_is_hidden_by_no_skip_on_another_machine(self):
        self.keep({}, failures=["Own.Test"], commit="b" * 40)
        self.keep({"All/Points": ["Test/One", "Test/Two"]}, skipped={"Own": ["Test"]}, gpus=1)
        self.assertEqual(self.cells()[1], "failed at bbbbbbb: `Own.Test`")

    def test_a_test_that_the_time_limit_ended_has_not_run(self):
        self.keep(OWN)
        self.keep({"cli_gpu": [""]}, "program")
        self.keep({}, failures=["All/Points.Test/One did not end"], exit_code=124)
        self.keep({"python_group": ["test_a"]}, "python", failures=["python_group.test_b did not end"], exit_code=124)
        self.assertEqual((self.cells()[1], self.cells()[3]), ("2 GPUs", "not run: `python_group`"))
        self.keep({"python_group": ["test_b"]}, "python")
        self.assertEqual(self.cells()[3], "2 GPUs")

    def test_runs_of_a_part_complete_each_other(self):
        self.keep({"Own": ["Test"]})
        self.keep({"All/Points": ["Test/One"]})
        self.keep({"All/Points": ["Test/Two"]})
        self.assertEqual(self.cells()[1], "2 GPUs")
        runs = json.loads((self.root / "bench/results/tests/2xh200-test.json").read_text())["runs"]
        self.assertEqual(len(runs), 3)
        self.keep(OWN)
        runs = json.loads((self.root / "bench/results/tests/2xh200-test.json").read_text())["runs"]
        self.assertEqual([run["passed"] for run in runs], [OWN])

    def test_an_edited_cell_is_found(self):
        self.keep(THREADS)
        path = self.root / gpu_tests.DOCUMENT
        path.write_text(path.read_text().replace("threads: 2 GPUs", "threads: 4 GPUs"))
        done = self.run_script("check")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("threads: 2 GPUs", done.stdout)

    def test_the_summary_counts_the_capabilities_that_have_passed(self):
        self.assertEqual(self.run_script("render").returncode, 0)
        self.assertEqual(self.summary(), "0 of 4")
        self.keep(OWN)
        self.assertEqual(self.summary(), "1 of 4")
        (self.root / "src/backends/cuda/kernel.cu").write_text("int b;\n")
        self.assertEqual(self.run_script("render").returncode, 0)
        self.assertEqual(self.summary(), "1 of 4 (1 with earlier kernels)")
        self.keep({}, failures=["Own.Test"])
        self.assertEqual(self.summary(), "0 of 4 (1 failed)")
        path = self.root / gpu_tests.SUMMARY
        path.write_text(path.read_text().replace("0 of 4", "4 of 4"))
        self.assertNotEqual(self.run_script("check").returncode, 0)


if __name__ == "__main__":
    unittest.main()
