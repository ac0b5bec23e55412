"""scripts/gpu with stand-ins for nvidia-smi and the program: every measuring part writes a record, and the program accepts the
arguments that the script passes."""

import json
import os
import pathlib
import shutil
import subprocess
import unittest

from program import ProgramTest, ferry

REPOSITORY = pathlib.Path(__file__).parents[2]
SMI = """#!/bin/sh
case "$*" in
  -L) printf 'GPU 0: A\\nGPU 1: A\\nGPU 2: A\\nGPU 3: A\\n' ;;
  *) printf 'A, 1.0\\nA, 1.0\\nA, 1.0\\nA, 1.0\\n' ;;
esac
"""
PROGRAM = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["FERRY_TEST_CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump({"schema": "ferry.bench.cuda", "schema_version": 3, "limits": [], "rows": []}, file)
"""
# Runs the program of rank 0, as mpirun -n 1 env NAME=VALUE PROGRAM ... : -n 1 ... does.
MPIRUN = """#!/bin/sh
while [ "$1" != -n ]; do shift; done
shift 2
exec "$@"
"""
ENGINE_PROGRAM = """#!/usr/bin/env python3
import json, os, sys
arguments = sys.argv[1:]
with open(os.environ["FERRY_TEST_CALLS"], "a") as calls:
    calls.write(json.dumps([os.environ.get(name, "") for name in ("FERRY_NCCL_BLOCKING", "FERRY_NCCL_REGISTER", "FERRY_HOST_ID", "NCCL_HOSTID")] + arguments) + "\\n")
def times(us):
    return {"p50_us": us, "least_us": us - 1, "most_us": us + 1}
call = times(240) | {"all_to_all": times(150), "copy": times(50), "bound_us": 200}
end = arguments.index(":")
with open(arguments[arguments.index("--json", 0, end) + 1], "w") as file:
    json.dump({"points": [{"layout": name, "dispatch": call, "combine": call} for name in ("expert_major", "rank_major")]}, file)
"""


class GpuPartsTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.folder)
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        self.put("bin/nvidia-smi", SMI)
        self.put("build/gpu/tools/ferry/ferry", PROGRAM)

    def put(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def run_parts(self, *parts, **variables):
        environment = os.environ | {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "FERRY_COMMIT": "0123456",
                                    "FERRY_TEST_CALLS": str(self.root / "calls")} | variables
        done = subprocess.run([self.root / "scripts/gpu", *parts], env=environment, capture_output=True, text=True, check=False,
                              timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [json.loads(line) for line in (self.root / "calls").read_text().splitlines()]

    def test_every_bench_part_writes_its_record(self):
        calls = self.run_parts("bench", FERRY_TRACES=self.folder)
        parts = {"bench-large", "bench-small", "bench-sweep", "bench-skew", "bench-layouts", "bench-baseline"}
        self.assertEqual(len(calls), len(parts))
        for part in parts:
            record = json.loads((self.root / f"build/gpu/results/{part}.json").read_text())
            self.assertEqual((record["part"], record["exit_code"]), (part, 0))
            self.assertEqual(record["measured"]["schema"], "ferry.bench.cuda")
            self.assertEqual(record["machine"]["gpus"], ["A"] * 4)

    @unittest.skipIf(os.path.exists("/dev/nvidia0"), "this machine has GPUs and can run the parts themselves")
    def test_the_program_accepts_the_arguments(self):
        for call in self.run_parts("bench", "bench-formats", "bench-hidden", "limits", FERRY_TRACES=""):
            self.assertEqual(call[call.index("--ranks") + 1], "4")
            done = ferry(*call[:call.index("--json")])
            self.assertEqual(done.returncode, 3, f"{call}: {done.stderr}")  # missing driver or backend, not a bad argument
            self.assertRegex(done.stderr, "no CUDA driver|no cuda backend")

    def test_recorded_routing_is_measured_if_present(self):
        self.assertNotIn("deepseek_v2_lite/intent", self.run_parts("bench-skew", FERRY_TRACES="")[0])
        self.assertIn("deepseek_v2_lite/intent", self.run_parts("bench-skew", FERRY_TRACES=self.folder)[1])

    def test_calls_over_nccl_are_measured_beside_their_bounds(self):
        self.put("bin/mpirun", MPIRUN)
        self.put("build/gpu/tools/ferry/ferry", ENGINE_PROGRAM)
        calls = self.run_parts("bench-nccl")
        self.assertEqual([tuple(call[:4]) for call in calls],
                         [("", "", "", ""), ("1", "", "", ""), ("1", "1", "", ""), ("", "", "first", "")] * 2 + [("", "", "first", "first")])
        for call in calls:
            arguments = call[4:call.index(":")]
            self.assertEqual(arguments[:3], ["bench", "--backend", "collective"])
            if os.path.exists("/dev/nvidia0"):
                continue
            done = ferry(*arguments[:arguments.index("--json")])
            self.assertEqual(done.returncode, 3, f"{arguments}: {done.stderr}")  # missing driver or backend, not a bad argument
        measured = json.loads((self.root / "build/gpu/results/bench-nccl.json").read_text())["measured"]
        self.assertEqual({line["setting"]: line["ratio"] for line in measured["summary"]},
                         {name: 1.2 for name in ["one host", "one host, blocking", "one host, blocking, registered", "two hops, 1 + 1",
                                                 "two hops, 1 + 1, network"]})
        self.assertEqual([(line["layout"], line["call"]) for line in measured["summary"][:4]],
                         [(layout, call) for layout in ("expert_major", "rank_major") for call in ("dispatch", "combine")])
        log = (self.root / "build/gpu/results/bench-nccl.log").read_text()
        self.assertEqual(log.count("target 1.25: met"), 12)

    def test_a_setting_over_nccl_that_fails_leaves_the_others(self):
        self.put("bin/mpirun", '#!/bin/sh\ncase "$FERRY_NCCL_REGISTER" in 1) exit 7; esac\n' + MPIRUN.removeprefix("#!/bin/sh\n"))
        self.put("build/gpu/tools/ferry/ferry", ENGINE_PROGRAM)
        with self.assertRaises(AssertionError):
            self.run_parts("bench-nccl")
        measured = json.loads((self.root / "build/gpu/results/bench-nccl.json").read_text())["measured"]
        self.assertEqual(list(measured["failed"]), ["one host, blocking, registered"])
        self.assertEqual(len(measured["summary"]), 16)


if __name__ == "__main__":
    unittest.main()
