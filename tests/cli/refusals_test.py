"""Invalid command lines: the right exit code, and one line that names the number at fault."""

import os
import unittest

from program import SMALL, ProgramTest, ferry


class RefusalsTest(ProgramTest):
    def test_messages_of_several_lines_become_one(self):
        for backend in ("collective", "nvshmem"):
            self.refuse(3, ["Tried: /none does not exist"], "run", "--backend", backend, environment={"FERRY_MPI_MODULE": "/none"})

    def test_usage(self):
        for words, arguments in [
            (["subcommand", "run, bench, launch, limits, model, doctor, trace"], []),
            (["walk", "run, bench, launch, limits, model, doctor, trace"], ["walk"]),
            (["--rank"], ["run", "--rank", "3"]),
            (["0", "--ranks"], ["run", "--ranks", "0"]),
            (["-1", "--ranks"], ["run", "--ranks=-1"]),
            (["many", "--ranks"], ["run", "--ranks", "many"]),
            (["0", "--steps"], ["run", "--steps", "0"]),
            (["0", "--tokens"], ["run", "--tokens", "0"]),
            (["33", "--top-k"], ["run", "--top-k", "33"]),
            (["--program /dev/zero: expected a regular file"], ["run", *SMALL, "--program", "/dev/zero"]),
            (["--compare /dev/zero: expected a regular file"], ["run", *SMALL, "--compare", "/dev/zero"]),
            (["/dev/zero: expected a regular file"], ["model", "--constants", "/dev/zero"]),
            (["/dev/zero: expected a regular file"], ["model", "--check", "/dev/zero"]),
            (["65", "--overlap"], ["run", "--overlap", "65"]),
            (["--overlap", "--backend cuda", "rank_major"], ["run", *SMALL, "--overlap", "2", "--backend", "cuda", "--layout", "rank_major"]),
            (["--backend collective", "mpirun -n 3"], ["run", *SMALL, "--engine", "nccl"]),
            (["--memory device", "--backend cuda"], ["run", *SMALL, "--memory", "device", "--backend", "cuda"]),
            (["--engine nccl", "--backend cpu", "collective"], ["bench", "--engine", "nccl"]),
            (["--memory device", "--backend cuda", "collective"], ["bench", "--backend", "cuda", "--memory", "device"]),
            (["--engine nccl with --memory host"], ["bench", "--backend", "collective", "--engine", "nccl", "--memory", "host"]),
            (["abacus", "--engine"], ["run", *SMALL, "--engine", "abacus"]),
            (["--input gathered", "--reduction unreduced"],
             ["run", *SMALL, "--input", "gathered", "--reduction", "unreduced", "--backend", "cuda"]),
            (["--shared-experts 1", "unreduced"], ["run", *SMALL, "--shared-experts", "1", "--reduction", "unreduced"]),
            (["--overlap", "--shared-experts"], ["run", *SMALL, "--shared-experts", "1", "--overlap", "2"]),
            (["--overlap", "expert_indexed"], ["run", *SMALL, "--overlap", "2", "--layout", "expert_indexed"]),
            (["transfer = gather", "expert_indexed"], ["run", *SMALL, "--input", "gathered", "--layout", "expert_indexed"]),
            (["shared_experts = 1", "rank_major"], ["run", *SMALL, "--shared-experts", "1", "--layout", "rank_major"]),
            (["--input replicated", "--reduction exact"], ["run", *SMALL, "--input", "replicated", "--reduction", "exact"]),
            (["--input gathered", "--reduction-level node"], ["run", *SMALL, "--input", "gathered", "--reduction-level", "node"]),
            (["transfer = gather", "rank_major"], ["run", *SMALL, "--input", "gathered", "--layout", "rank_major"]),
            (["scattered", "--input"], ["run", "--input", "scattered"]),
            (["17", "--shared-experts"], ["run", "--shared-experts", "17"]),
            (["diagonal", "--layout"], ["run", "--layout", "diagonal"]),
            (["sum", "--reduction"], ["run", "--reduction", "sum"]),
            (["abacus", "--backend"], ["run", "--backend", "abacus"]),
            (["reference", "--backend", "cpu,cuda,collective,nvshmem"], ["run", "--backend", "reference"]),
            (["bf17"], ["run", "--format", "bf17"]),
            (["raw:17", "no values"], ["run", "--format", "raw:17"]),
            (["fp8-packed", "fp8[-columns][-pow2[-packed]]"], ["run", "--format", "fp8-packed"]),
            (["mxfp4-up-ocp", "mxfp4[-up|-ocp][-columns|-tiles]"], ["run", "--format", "mxfp4-up-ocp"]),
            (["mxfp8-tiles", "rank_major has no tiles"], ["run", "--format", "mxfp8-tiles", "--layout", "rank_major"]),
            (["--hidden 48: ", "24 bytes", "make hidden a multiple of 32"], ["run", "--hidden", "48", "--format", "mxfp4"]),
            (["--global-scale 0", "positive and finite"], ["run", "--format", "nvfp4", "--global-scale", "0"]),
            (["--global-scale 1e+39", "as fp32"], ["run", "--format", "nvfp4", "--global-scale", "1e39"]),
            (["--global-scale", "needs a number"], ["run", "--format", "nvfp4", "--global-scale", ""]),
            (["--global-scale 0.5", "nvfp4"], ["run", "--format", "nvfp4-token", "--global-scale", "0.5"]),
            (["--global-scale 0.5", "nvfp4"], ["bench", "--format", "fp8,mxfp4", "--global-scale", "0.5"]),
            (["--global-scale", "--overlap"], ["run", *SMALL, "--format", "nvfp4", "--global-scale", "0.5", "--overlap", "2"]),
            (["--seed -1", "18446744073709551615"], ["run", "--seed", "-1"]),
            (["--seed -1"], ["bench", "--seed=-1"]),
            (["18446744073709551616"], ["run", "--seed", "18446744073709551616"]),
            (["--seed 7x"], ["run", "--seed", "7x"]),
            (["18446744073709551616"], ["run", "--trace", "synth:decode:seed=18446744073709551616"]),
            (["--trace", "empty"], ["run", "--trace", ""]),
            (["--trace", "empty"], ["bench", "--trace", ""]),
            (["--json", "empty"], ["run", *SMALL, "--json", ""]),
            (["--json", "empty"], ["limits", "--json", ""]),
            (["--html", "empty"], ["run", *SMALL, "--html", ""]),
            (["--out", "empty"], ["trace", "synth", "synth:decode", "--out", ""]),
            (["absent.npy", "no such file"], ["run", "--trace", "absent.npy"]),
            (["absent.npy", "no such file"], ["trace", "info", "absent.npy"]),
            (["raw:32"], ["run", "--format", "raw:32"]),
            (["--hidden 7: ", "7 bf16", "14 bytes", "16"], ["run", "--hidden", "7"]),
            (["--hidden 7: ", "14 bytes"], ["bench", "--hidden", "7"]),
            (["--hidden 24: ", "24 bytes", "make hidden a multiple of 16"], ["run", "--hidden", "24", "--format", "fp8"]),
            (["0", "alignment"], ["run", "--alignment", "0"]),
            (["rank_major", "alignment = 8"], ["run", "--layout", "rank_major", "--alignment", "8"]),
            (["exact", "rank_major"], ["run", "--layout", "rank_major", "--reduction", "exact"]),
            (["20000000", "max_tokens"], ["run", "--tokens", "20000000", "--trace", "synth:uniform:tokens=16"]),
            (["--layer 4", "0 to 3"], ["run", "--layer", "4"]),
            (["--experts 8", "16"], ["run", *SMALL, "--experts", "8"]),
            (["--top-k 3", "4"], ["run", *SMALL, "--top-k", "3"]),
            (["top_k", "9"], ["run", "--trace", "synth:decode:experts=8,top_k=9"]),
            (["synth:rain"], ["run", "--trace", "synth:rain"]),
            (["no/such", "FERRY_TRACES is not set", ".npy", "synth:"], ["run", "--trace", "no/such"]),
            (["tokens=0", "found 0"], ["trace", "info", "synth:decode:tokens=0"]),
            (["name"], ["trace", "info"]),
            (["--out"], ["trace", "synth", "synth:decode"]),
            (["--readme", "excludes", "--tokens"], ["bench", "--readme", "--tokens", "4"]),
            (["--readme", "excludes", "--backend"], ["bench", "--backend", "cpu", "--readme"]),
            (["--readme", "excludes", "--processes"], ["bench", "--processes", "--readme", "--json", "-"]),
            (["--sms 4: is only for --backend cuda"], ["bench", "--sms", "4"]),
            (["1", "--ranks"], ["limits", "--ranks", "1"]),
        ]:
            with self.subTest(arguments=arguments):
                self.refuse(2, words, *arguments)

    def test_unknown_format_lists_what_can_be_run(self):
        for command in ["run", "bench"]:
            done = ferry(command, "--format", "foo")
            self.assertEqual(done.returncode, 2)
            self.assertIn("foo", done.stderr)
            self.assertIn("bf16", done.stderr)
            self.assertNotIn("raw", done.stderr)

    def test_outputs_that_collide(self):
        here, detour = self.path("a"), os.path.join(self.folder, "none", "..", "a")
        for words, arguments in [
            (["--json", "--html", here], ["--json", here, "--html", here]),
            (["--html", "--timeline", here], ["--html", detour, "--timeline", here]),
            (["--json -", "--html -"], ["--json", "-", "--html", "-"]),
            (["--json -", "--timeline -"], ["--json", "-", "--timeline", "-"]),
        ]:
            with self.subTest(arguments=arguments):
                self.refuse(2, words, "run", *SMALL, *arguments)
                self.assertEqual(os.listdir(self.folder), [])

    def test_earlier_runs_that_cannot_be_compared(self):
        bench = self.path("bench.json")
        with open(bench, "w", encoding="utf-8") as file:
            file.write('{"schema": "ferry.bench", "schema_version": 2}')
        text, run = self.path("text"), self.path("run.json")
        with open(text, "w", encoding="utf-8") as file:
            file.write("no JSON")
        self.succeed("run", *SMALL, "--json", run)
        with open(run, encoding="utf-8") as file:
            report = file.read()
        for code, words, arguments in [
            (2, [self.path("none"), "No such file"], ["--compare", self.path("none")]),
            (2, [self.folder, "Is a directory"], ["--compare", self.folder]),
            (2, [text, "not JSON", "--json FILE"], ["--compare", text]),
            (2, [bench, "schema ferry.bench", "expected ferry.run"], ["--compare", bench]),
            (2, ["--compare " + run, "--json " + run, "same file"], ["--compare", run, "--json", run]),
            (2, ["--compare with --overlap"], ["--compare", run, "--overlap", "2"]),
            (2, ["--compare", "empty"], ["--compare", ""]),
        ]:
            with self.subTest(arguments=arguments):
                self.refuse(code, words, "run", *SMALL, *arguments)
        with open(run, encoding="utf-8") as file:
            self.assertEqual(file.read(), report)

    def test_recorded_trace_in_a_folder_that_is_not_there(self):
        self.refuse(2, [self.path("none"), "FERRY_TRACES"], "run", "--trace", "a/b",
                    environment={"FERRY_TRACES": self.path("none")})

    def test_recorded_trace_that_is_not_in_its_folder(self):
        self.refuse(2, ["a/b", "ferry trace list"], "run", "--trace", "a/b", environment={"FERRY_TRACES": self.folder})

    def test_damaged_trace(self):
        path = self.path("x.ids.npy")
        with open(path, "wb") as file:
            file.write(b"\x93NUMPY\x01\x00 truncated")
        self.refuse(2, [path], "run", "--trace", path)

    def test_programs(self):
        layer = ("program layer\ninput x: tokens\ninput ids: ids\nrows = dispatch(x, ids)\n"
                 "a: outputs = call experts(rows)\ny = combine(a, rows)\noutput y\n")
        path = os.path.join(self.folder, "layer.txt")
        for words, text in [
            (["program layer, outputs: none is of kind tokens", "add a line 'output NAME'"], layer.replace("output y\n", "")),
            (["program layer, outputs: none is of kind tokens"], layer.replace("output y", "output rows")),
            (["step a (call other): ferry run has one function, experts"], layer.replace("call experts", "call other")),
            (["step a (call experts): ferry run has one function"], layer.replace("experts(rows)", "experts(rows, x)")),
            (["step a, b (call experts): ferry run has one function"], layer.replace("a: outputs", "a: outputs, b: tokens")),
            (["input n: ferry run passes tokens, ids and weights only"], layer + "input n: count\n"),
            (["lane 2147483647: lanes are 0 to 63"], layer.replace("dispatch(x, ids)", "dispatch(x, ids) lane=2147483647")),
            (["line 1: has a byte 0: this is no text"], "program \0layer\n"),
        ]:
            with self.subTest(words=words, text=text):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
                for options in [], ["--overlap", "2"]:
                    self.refuse(2, words, "run", *SMALL, "--program", path, *options)

    def test_files_that_cannot_be_opened(self):
        beyond = os.path.join(self.folder, "none", "x.json")
        for words, arguments in [
            (["--program absent.txt: No such file"], ["run", *SMALL, "--program", "absent.txt"]),
            (["--program /: Is a directory"], ["run", *SMALL, "--program", "/"]),
            ([beyond, "No such file"], ["run", *SMALL, "--json", beyond]),
            ([beyond], ["run", *SMALL, "--html", beyond]),
            ([beyond], ["run", *SMALL, "--timeline", beyond]),
            ([beyond], ["limits", "--json", beyond]),
            ([beyond], ["trace", "info", "synth:decode", "--json", beyond]),
            (["none"], ["trace", "synth", "synth:decode:tokens=16", "--out", os.path.join(self.folder, "none", "x")]),
            ([beyond], ["bench", "--json", beyond]),
            ([self.folder, "Is a directory"], ["limits", "--json", self.folder]),
        ]:
            with self.subTest(arguments=arguments):
                self.refuse(2, words, *arguments, timeout=10)  # before anything is measured

    def test_system(self):
        for words, arguments in [
            (["cuda"], ["run", *SMALL, "--backend", "cuda"]),
            (["1,024 ranks", "GB", "free"], ["run", "--ranks", "1024"]),
            (["2,000,000,000", "GB"], ["run", *SMALL, "--inner", "2000000000"]),
            (["10,000,000", "GB"], ["run", "--tokens", "10000000", "--trace", "synth:uniform:tokens=16"]),
        ]:
            with self.subTest(arguments=arguments):
                self.refuse(3, words, *arguments)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_full_disk(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = ferry("trace", "info", "synth:decode:tokens=16", "--json", "-", stdout=full)
        self.assertEqual(done.returncode, 3)
        self.assertIn("No space left", done.stderr)


if __name__ == "__main__":
    unittest.main()
