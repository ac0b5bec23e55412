"""Help texts, the version, and the documentation of exit codes."""

import unittest

from program import ProgramTest, ferry

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
        self.assertIn("above 100 %", self.succeed("bench", "--help"))

    def test_a_misspelt_option_is_answered_with_the_nearest(self):
        self.refuse(2, ["--formats", "did you mean --format?"], "bench", "--formats", "bf16")
        self.refuse(2, ["--htm=", "did you mean --html?"], "run", "--htm=page.html")
        self.refuse(2, ["--tokns", "did you mean --tokens?"], "run", "--tokns", "4")
        self.refuse(2, ["--rank", "did you mean --ranks?"], "trace", "info", "synth:decode", "--rank", "3")
        done = ferry("run", "--nothing-like-it")
        self.assertNotIn("did you mean", done.stderr)

    def test_version(self):
        self.assertRegex(self.succeed("--version"), r"\Aferry \d+\.\d+\.\d+\n\Z")


if __name__ == "__main__":
    unittest.main()
