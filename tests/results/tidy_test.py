"""scripts/tidy.py: it checks every source, alone or in a unity file, and the repository's headers, wherever the repository lies."""

import json
import os
import shutil
import subprocess
import sys
import unittest

from small_repository import REPOSITORY, SmallRepository

MISTAKE = "inline int* {} = 0;\n"  # modernize-use-nullptr
FILES = {
    ".clang-tidy": (REPOSITORY / ".clang-tidy").read_text(),
    "src/exchange/backend.hpp": MISTAKE.format("in_a_header"),
    "src/alone.cpp": MISTAKE.format("alone"),
    "tools/ferry/common/no_gpu.cpp": '#include "exchange/backend.hpp"\n#include "library.hpp"\n' + MISTAKE.format("in_unity"),
    "tests/cli/checker.cpp": MISTAKE.format("in_a_test"),
    "installed/library.hpp": MISTAKE.format("of_others"),
}
PLACES = ("ferry", "src/ferry", "with space/c++ (1)", "long-name-" * 20)


@unittest.skipUnless(shutil.which("run-clang-tidy-19"), "no run-clang-tidy-19")
class TidyTest(SmallRepository):
    def place(self, name):
        """The small repository in a folder of that name, and its build with a unity file of no_gpu.cpp and a test."""
        root = self.root / name
        build = root / "build/tidy"
        unity = build / "tests/cli/CMakeFiles/checker.dir/Unity/unity_0_cxx.cxx"
        lines = "".join(f'#include "{root / source}"\n' for source in ("tools/ferry/common/no_gpu.cpp", "tests/cli/checker.cpp"))
        for path, text in {**{root / file: text for file, text in FILES.items()}, unity: lines}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (build / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={root}\n")
        self.compile(build, root, root / "src/alone.cpp", unity)
        return build

    def compile(self, build, root, *files):
        words = ["c++", "-I", str(root / "src"), "-I", str(root / "installed"), "-c"]
        (build / "compile_commands.json").write_text(json.dumps(
            [{"directory": str(build), "file": str(file), "arguments": [*words, str(file)]} for file in files]))

    def tidied(self, build):
        done = subprocess.run([sys.executable, "-B", str(REPOSITORY / "scripts/tidy.py"), str(build)], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertNotEqual(done.returncode, 0)
        return done.stdout + done.stderr

    def test_mistakes_are_found_wherever_the_repository_lies(self):
        for name in PLACES:
            with self.subTest(name):
                found = self.tidied(self.place(name))
                for mistake in ("alone", "in_unity", "in_a_header"):
                    self.assertIn(f"int* {mistake} = 0", found)
                self.assertNotIn("of_others", found)
                self.assertNotIn("not found", found)

    def test_through_a_symbolic_link(self):
        build = self.place("here")
        os.symlink(self.root / "here", self.root / "ferry")
        found = self.tidied(self.root / "ferry" / build.relative_to(self.root / "here"))
        for mistake in ("alone", "in_unity", "in_a_header"):
            self.assertIn(f"int* {mistake} = 0", found)

    def test_a_source_that_no_build_compiles_is_an_error(self):
        build = self.place("ferry")
        self.compile(build, self.root / "ferry", self.root / "ferry/src/alone.cpp")
        self.assertIn("compiles none of: tools/ferry/common/no_gpu.cpp", self.tidied(build))


if __name__ == "__main__":
    unittest.main()
