"""Runs the program under test, whose path is the environment variable FERRY_PROGRAM."""

import json
import os
import re
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["FERRY_PROGRAM"]
SMALL = ["--ranks", "3", "--steps", "2", "--tokens", "5", "--hidden", "128", "--inner", "16",
         "--trace", "synth:decode:experts=16,top_k=4,tokens=64,layers=2"]
LAYOUTS = ["expert_major", "expert_padded", "rank_major", "expert_indexed"]
FORMATS = ["bf16", "fp16", "fp32", "fp8", "fp8-columns", "fp8-pow2", "fp8-columns-pow2-packed", "mxfp8-columns", "mxfp4"]
TILED = ["mxfp8-tiles", "mxfp4-up-tiles", "nvfp4-tiles", "nvfp4-token-tiles"]  # not in rank_major
BLOCK_FORMATS = ["mxfp8", "mxfp8-ocp", "mxfp4-up", "mxfp4-columns", "nvfp4", "nvfp4-columns", "nvfp4-token", "nvfp4-token-columns"]
PROGRESS = re.compile(r"ferry: [a-z, ]+: \d+ of \d+(, about \d\d:\d\d:\d\d left)?\n")  # in a log, of commands that take over 2 s


def ferry(*arguments, environment=None, stdout=subprocess.PIPE, timeout=200):
    """The finished process, without its lines of progress. Recorded traces are found only if `environment` says so."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("FERRY_")}
    variables.update(environment or {})
    done = subprocess.run([PROGRAM, *map(str, arguments)], env=variables, timeout=timeout, text=True,
                          stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, check=False)
    done.stderr = PROGRESS.sub("", done.stderr)
    return done


class ProgramTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def succeed(self, *arguments, **options):
        """Standard output of a run that ends with 0 and writes nothing on stderr."""
        done = ferry(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def refuse(self, code, words, *arguments, **options):
        """The program ends with `code`, says one line on stderr that holds all of `words`, and prints nothing."""
        done = ferry(*arguments, **options)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stderr}{done.stdout}")
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\Aferry: [^\n]+\n\Z")
        for word in words:
            self.assertIn(word, done.stderr, arguments)

    def run_small(self, *arguments, **options):
        """The report of a small run, as JSON."""
        return json.loads(self.succeed("run", *SMALL, "--json", "-", *arguments, **options))
