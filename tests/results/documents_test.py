"""scripts/check_documents.py: it finds links that lead nowhere, files that pages about the source name in vain, and pages that are too long."""

import subprocess
import sys
import unittest

from small_repository import REPOSITORY, SmallRepository

SCRIPT = REPOSITORY / "scripts/check_documents.py"


class DocumentsTest(SmallRepository):
    FILES = {"README.md": "# Title\n\n[a page](docs/page.md#part)\n", "docs/page.md": "# Page\n\n## Part\n"}

    def problems(self, *options):
        done = subprocess.run([sys.executable, "-B", SCRIPT, "--root", self.root, *options], capture_output=True, text=True, check=False)
        self.assertEqual(bool(done.returncode), ":" in done.stdout, done.stderr)
        return done.stdout

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def test_links_lead_somewhere(self):
        self.assertEqual(self.problems(), "")
        for text, problem in (("[x](y.md)", "there is no y.md"), ("[x](page.md#y)", "has no such heading")):
            self.write("docs/other.md", text)
            self.assertIn(f"docs/other.md: link to {text[4:-1]}: ", self.problems())
            self.assertIn(problem, self.problems())

    def test_pages_about_the_source_name_files_that_exist(self):
        self.write("docs/index.md", "```{toctree}\n:caption: Source\npage\n```\n")
        self.write("src/rows/plan.hpp", "")
        self.write("docs/page.md", "## Part\n`rows/plan.hpp`, `plan.*`, `src/rows/`\n")
        self.assertEqual(self.problems(), "")
        self.write("docs/page.md", "## Part\n`rows/plan.cpp`, `row.*`\n")
        for name in ("rows/plan.cpp", "row.*"):
            self.assertIn(f"docs/page.md: there is no file {name}\n", self.problems())
        self.write("docs/index.md", "```{toctree}\n:caption: Use\npage\n```\n")
        self.assertEqual(self.problems(), "")

    def test_pages_have_at_most_4000_words(self):
        self.write("docs/long.md", "word " * 4000)
        self.assertEqual(self.problems(), "")
        self.write("docs/long.md", "word " * 4001)
        self.assertIn("docs/long.md: has 4,001 words", self.problems())

    def test_generated_tables_and_logs_are_not_counted(self):
        self.write("docs/page.md", "## Part\n<!-- results:x -->\n" + "word " * 4001 + "\n<!-- /results -->\n")
        for name in ("docs/log/day.md", "CHANGELOG.md", "bench/results/tests/capabilities.md"):
            self.write(name, "word " * 4001)
        self.assertEqual(self.problems(), "")
        self.assertIn("     2 docs/page.md\n", self.problems("--words"))
        self.assertNotIn("day.md", self.problems("--words"))


if __name__ == "__main__":
    unittest.main()
