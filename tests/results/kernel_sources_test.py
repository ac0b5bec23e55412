"""scripts/kernel_sources.py: the hash changes with the code that a kernel is built from, and with nothing else."""

import unittest

from small_repository import REPOSITORY, SmallRepository  # first, because it finds the scripts

from kernel_sources import hash_of_kernels, kernel_sources

FILES = {
    "src/backends/cuda/kernel.cu": '#include "layout/row.hpp"\n#include <cuda.h>\n// copies\nint a = 1\'000; const char* s = "// x";\n',
    "src/layout/row.hpp": '#include "ferry/types.hpp"\nint b = 2;\n',
    "src/layout/unused.hpp": "int c = 3;\n",
    "include/ferry/types.hpp": "int d = 4;\n",
}


class KernelSourcesTest(SmallRepository):
    FILES = FILES

    def setUp(self):
        super().setUp()
        self.before = hash_of_kernels(self.root)

    def changed_by(self, name, old, new):
        path = self.root / name
        text = path.read_text()
        self.assertIn(old, text)
        path.write_text(text.replace(old, new))
        changed = hash_of_kernels(self.root) != self.before
        path.write_text(text)
        return changed

    def test_included_files_count_and_others_do_not(self):
        self.assertEqual(list(map(str, kernel_sources(self.root))), sorted(set(FILES) - {"src/layout/unused.hpp"}))
        self.assertTrue(self.changed_by("include/ferry/types.hpp", "4", "5"))
        self.assertTrue(self.changed_by("src/layout/row.hpp", "2", "3"))
        self.assertFalse(self.changed_by("src/layout/unused.hpp", "3", "4"))

    def test_comments_and_white_space_do_not_count(self):
        self.assertFalse(self.changed_by("src/backends/cuda/kernel.cu", "// copies", "/* moves\n */  // rows"))
        self.assertTrue(self.changed_by("src/backends/cuda/kernel.cu", "// x", "// y"))
        self.assertTrue(self.changed_by("src/backends/cuda/kernel.cu", "'000", "'001"))

    def test_the_repository_has_kernels_of_both_operations(self):
        names = set(map(str, kernel_sources(REPOSITORY)))
        self.assertLessEqual({"src/backends/cuda/combine/kernels/combine_launch.cu", "src/backends/cuda/dispatch/kernels/dispatch_kernel.cuh",
                              "src/layout/plan_layout.hpp", "src/format/numbers.hpp", "include/ferry/types.hpp"}, names)
        self.assertNotIn("src/backends/cpu/backend.cpp", names)


if __name__ == "__main__":
    unittest.main()
