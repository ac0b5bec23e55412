"""Help texts, the version, and the documentation of exit codes."""

import os
import subprocess
import unittest

from program import PROGRAM, SMALL, ProgramTest, ferry

COMMANDS = [["run"], ["bench"], ["launch"], ["limits"], ["model"], ["doctor"], ["trace"], ["trace", "info"], ["trace", "synth"], ["trace", "list"]]


class HelpTest(ProgramTest):
    def test_program(self):
        text = self.succeed("--help")
        for word in ["run", "bench", "limits", "model", "doctor", "trace", "Examples:", "Exit codes: 0", "1 a check failed"]:
            self.assertIn(word, text)

    def test_every_command(self):
        for command in COMMANDS:
            with self.subTest(command=command):
                text = self.succeed(*command, "--help")
                self.assertIn("Usage: ferry " + " ".join(command), text)
                if command != ["trace", "list"]:
                    self.assertIn("Example", text)

    def test_run_names_every_option(self):
        text = self.succeed("run", "--help")
        for option in ["backend", "ranks", "processes", "trace", "layer", "steps", "tokens", "experts", "top-k", "seed",
                       "hidden", "inner", "layout", "format", "reduction", "alignment", "json", "html", "timeline", "compare"]:
            self.assertIn("--" + option, text)

    def test_formats(self):
        for command in ["run", "bench"]:
            self.assertIn("fp8[-columns][-pow2[-packed]]", self.succeed(command, "--help"))

    def test_bench_explains_shares_above_memcpy(self):
        columns = self.succeed("bench", "--help-columns")
        for word in ["above 100 %", "count as moved", "Columns with --backend cuda", "With --readme"]:
            self.assertIn(word, columns)
        self.assertLess(self.succeed("bench", "--help").count("\n"), 100)

    def test_a_misspelt_option_is_answered_with_the_nearest(self):
        self.refuse(2, ["--formats", "did you mean --format?"], "bench", "--formats", "bf16")
        self.refuse(2, ["--htm=", "did you mean --html?"], "run", "--htm=page.html")
        self.refuse(2, ["--tokns", "did you mean --tokens?"], "run", "--tokns", "4")
        self.refuse(2, ["--rank", "did you mean --ranks?"], "trace", "info", "synth:decode", "--rank", "3")
        self.refuse(2, ["--expert 3 --tokns 4 ", "did you mean --experts, --tokens?"], "run", "--expert", "3", "--tokns", "4")
        done = ferry("run", "--nothing-like-it")
        self.assertNotIn("did you mean", done.stderr)

    def test_a_misspelt_command_is_answered_with_the_nearest_or_with_all(self):
        for words, meant in [(["rnu"], "did you mean run?"), (["benchmark", "--tokens", "4"], "did you mean bench?"),
                             (["walk"], "the subcommands are run, bench,"), (["trace", "inof"], "did you mean info?"),
                             (["trace", "inspect", "x"], "the subcommands are info, balance, synth, list;")]:
            self.refuse(2, [meant, "not expected: " + " ".join(words[words[0] == "trace":])], *words)
        self.refuse(2, ["not expected: 4 --rank ", "did you mean --ranks?"], "bench", "4", "--rank")

    def test_help_of_a_misspelt_command_is_no_other_help(self):
        self.refuse(2, ["not expected: limit (did you mean limits?"], "limit", "--help")
        self.refuse(2, ["not expected: bnech (did you mean bench?"], "help", "bnech")
        self.refuse(2, ["not expected: inspect (the subcommands are info,"], "trace", "inspect", "--help")

    def test_help_is_a_command_too(self):
        for command in [[], *COMMANDS]:
            self.assertEqual(self.succeed("help", *command), self.succeed(*command, "--help"))

    def test_ranks_have_a_short_option(self):
        for command in ["run"], ["bench"], ["launch"], ["limits"], ["model"], ["trace", "info"], ["trace", "balance"]:
            self.assertIn("-n,--ranks", self.succeed(*command, "--help"), command)
        self.assertIn("2 ranks", self.succeed("run", *SMALL, "-n", "2"))

    def test_colours_on_a_terminal(self):
        for variables, red in [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)]:
            with self.subTest(variables):
                terminal, other = os.openpty()
                environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | variables
                subprocess.run([PROGRAM, "rnu"], stderr=other, env=environment, check=False)
                os.close(other)
                self.assertEqual(b"\x1b[31mferry:\x1b[0m not" in os.read(terminal, 1000), red)
                os.close(terminal)

    def test_version(self):
        self.assertRegex(self.succeed("--version"), r"\Aferry \d+\.\d+\.\d+\n\Z")


if __name__ == "__main__":
    unittest.main()
