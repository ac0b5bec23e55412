"""scripts/kernel_resources.py: a kernel that differs from the table is found, and files that are as in the table are not compiled."""

import contextlib
import functools
import io
import json
import os
import unittest

from small_repository import SmallRepository  # first, because it finds the scripts

import kernel_resources

KERNEL = "_ZN5ferry4cuda39_GLOBAL__N__4a3fd82f_7_rows_cu_343e41264copyENS0_13CopyArgumentsE"
CALLED = "_ZN37_INTERNAL_4a3fd82f_7_rows_cu_343e41265ferry4cuda4wide4waitEi"
# Says what ptxas says, and notes how it compiles. Its device code is what stands in row.hpp.
COMPILER = f"""#!/bin/sh
if [ "$1" = --version ]; then echo 'release 13.0, V13.0.88'; exit; fi
for output; do :; done
sed 's, *//.*,,' ROOT/src/layout/row.hpp >"$output"
case "$*" in *-ptx*) exit ;; *-arch=sm_100*) exit BLACKWELL ;; esac
echo "$@" >>ROOT/compiled
cat >&2 <<'TEXT'
ptxas info    : 504 bytes gmem
ptxas info    : Compiling entry function '{KERNEL}' for 'sm_90'
ptxas info    : Function properties for {KERNEL}
    24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used REGISTERS registers, used 2 barriers, 24 bytes cumulative stack size, 1768 bytes smem
ptxas info    : Function properties for {CALLED}
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
TEXT
"""


class KernelResourcesTest(SmallRepository):
    FILES = {"src/backends/cuda/copy/rows.cu": '#include "layout/row.hpp"\nint a;\n', "src/layout/row.hpp": "int b;  // a row\n"}

    def setUp(self):
        super().setUp()
        os.environ.pop("CMAKE_CUDA_COMPILER_LAUNCHER", None)  # an object cache would answer in place of this compiler
        source = self.root / "src/backends/cuda/copy/rows.cu"
        self.compiler = self.root / "nvcc"
        self.let_registers_be(40)
        command = f"{self.compiler} -DX=1 -I{self.root}/src --fmad=false --Ofast-compile=max -x cu -c {source} -o rows.cu.o"
        (self.root / "compile_commands.json").write_text(json.dumps([{"directory": str(self.root), "file": str(source), "command": command}]))
        self.run_script("record")

    def let_registers_be(self, number, blackwell=0):
        words = {"REGISTERS": str(number), "ROOT": str(self.root), "BLACKWELL": str(blackwell)}
        self.compiler.write_text(functools.reduce(lambda text, word: text.replace(*word), words.items(), COMPILER))
        self.compiler.chmod(0o755)

    def run_script(self, *arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            kernel_resources.main([arguments[0], str(self.root), *arguments[1:]], self.root)
        return output.getvalue()

    def times_compiled(self):
        return len((self.root / "compiled").read_text().splitlines())

    def test_the_table_has_what_the_compiler_says(self):
        table = json.loads((self.root / kernel_resources.TABLE).read_text())
        self.assertEqual(table["toolkit"], "13.0.88")
        self.assertEqual(table["files"]["copy/rows.cu"]["kernels"], {
            "copy": {"stack": 24, "spill_stores": 8, "spill_loads": 4, "registers": 40, "shared": 1768},
            "wide::wait": {"stack": 16, "spill_stores": 0, "spill_loads": 0}})
        options = (self.root / "compiled").read_text()
        self.assertIn("-DX=1 --fmad=false", options)
        self.assertNotIn("Ofast", options)

    def test_files_with_the_code_of_the_table_are_not_compiled(self):
        self.let_registers_be(41)
        (self.root / "src/layout/row.hpp").write_text("int b;  // another comment\n")
        self.assertIn("0 of 1 files compiled, 0 differences", self.run_script("check"))
        self.assertEqual(self.times_compiled(), 1)

    def test_a_kernel_that_takes_more_registers_is_found(self):
        (self.root / "src/layout/row.hpp").write_text("int c;\n")
        self.assertIn("1 of 1 files compiled, 0 differences", self.run_script("check"))
        self.let_registers_be(41)
        with self.assertRaisesRegex(SystemExit, "says otherwise"):
            self.run_script("check")
        self.assertIn("1 differences", self.run_script("record"))
        self.assertIn("0 of 1 files compiled", self.run_script("check"))
        self.let_registers_be(42)
        with self.assertRaises(SystemExit):
            self.run_script("check", "--all")

    def test_a_file_that_does_not_compile_for_sm_100_is_found(self):
        self.let_registers_be(40, blackwell=1)
        self.run_script("check")  # the file is none of those that stand for all
        with self.assertRaisesRegex(SystemExit, "-arch=sm_100"):
            self.run_script("check", "--all")

    def test_another_toolkit_is_not_compared(self):
        self.compiler.write_text(self.compiler.read_text().replace("V13.0.88", "V13.1.0"))
        self.assertIn("not compared", self.run_script("check", "--all"))


if __name__ == "__main__":
    unittest.main()
