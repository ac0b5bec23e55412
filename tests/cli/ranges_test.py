"""NVTX ranges: with FERRY_NVTX a profiler sees every call, otherwise none."""

import collections
import os
import tempfile
import unittest

from program import SMALL, ProgramTest, ferry


class RangesTest(ProgramTest):
    def ranges(self, **environment):
        with tempfile.TemporaryDirectory() as folder:
            seen = os.path.join(folder, "ranges")
            settings = {"NVTX_INJECTION64_PATH": os.environ["FERRY_FAKE_PROFILER"], "FERRY_TEST_RANGES": seen}
            done = ferry("run", *SMALL, environment=settings | environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            return open(seen, encoding="utf-8").read().split("\n")[:-1] if os.path.exists(seen) else []

    def test_every_call_is_a_range(self):
        counted = collections.Counter(self.ranges(FERRY_NVTX="1"))
        begun = {line.split()[2]: number for line, number in counted.items() if line.startswith("+ ferry ")}
        self.assertLessEqual({"dispatch", "combine"}, set(begun))
        self.assertEqual(begun["dispatch"], begun["combine"])
        self.assertEqual(sum(begun.values()), counted["-"])

    def test_without_the_variable_there_are_none(self):
        self.assertEqual(self.ranges(), [])
        self.assertEqual(self.ranges(FERRY_NVTX="0"), [])


if __name__ == "__main__":
    unittest.main()
