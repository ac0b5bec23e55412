"""scripts/check_rooms.py: refuses an include against the arrows, a circle in the table, an arrow that nothing uses, and
comparisons with one format's kind."""

import unittest

from small_repository import SmallRepository  # first, because it finds the scripts

from check_rooms import compared_kinds, faults

FILES = {
    "include/ferry/types.hpp": "",
    "src/low/a.hpp": '#include "ferry/types.hpp"\n#include <vector>\n',
    "src/high/b.cpp": '#include "low/a.hpp"\n#include "high/b.hpp"\n#include "c.hpp"\n',
    "src/high/b.hpp": "",
    "src/high/c.hpp": "",
}


class RoomsTest(SmallRepository):
    FILES = FILES

    def test_allowed_arrows_pass(self):
        self.assertEqual(list(faults(self.root, {"low": "", "high": "low"})), [])

    def test_an_include_against_the_arrows_is_refused(self):
        (self.root / "src/low/a.hpp").write_text('#include "high/b.hpp"\n')
        errors = list(faults(self.root, {"low": "", "high": "low"}))
        self.assertEqual(len(errors), 1)
        self.assertIn("src/low/a.hpp includes high/b.hpp: low may not include high", errors[0])

    def test_a_folder_that_the_table_lacks_may_include_nothing(self):
        errors = list(faults(self.root, {"low": ""}))
        self.assertEqual(len(errors), 1)
        self.assertIn("high may not include low", errors[0])

    def test_a_circle_in_the_table_is_refused(self):
        (self.root / "src/low/a.hpp").write_text('#include "high/b.hpp"\n')
        self.assertEqual(list(faults(self.root, {"low": "high", "high": "low"})),
                         ["ROOMS: low may include high, which does not stand before it"])

    def test_an_arrow_that_nothing_uses_is_refused(self):
        self.assertEqual(list(faults(self.root, {"low": "", "middle": "low", "high": "low"})),
                         ["ROOMS: nothing in middle includes low: remove this arrow"])

    def test_kernels_of_one_host_include_no_transport(self):
        rooms = {"low": "", "high": "low", "backends/nvshmem": "", "middle": "backends/nvshmem", "backends/cuda/combine": "middle"}
        self.assertIn("ROOMS: backends/cuda/combine holds kernels of one host, and includes backends/nvshmem",
                      list(faults(self.root, rooms)))

    def test_comparisons_with_one_format_are_refused_outside_its_folder(self):
        text = "if (kind == FormatKind::nvfp4 ||\n    FormatKind::raw != kind) return FormatKind::bf16;\n"
        (self.root / "src/format").mkdir()
        (self.root / "src/format/a.cpp").write_text(text)
        self.assertEqual(list(compared_kinds(self.root)), [])
        (self.root / "src/low/a.cpp").write_text(text)
        errors = list(compared_kinds(self.root))
        self.assertEqual([error.split(" ")[0] for error in errors], ["src/low/a.cpp:1", "src/low/a.cpp:2"])


if __name__ == "__main__":
    unittest.main()
