"""A folder with a few files that stands for a repository, for tests of the scripts that read one."""

import pathlib
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))  # whoever imports this module can import the scripts


class SmallRepository(unittest.TestCase):
    """`self.root` holds FILES, text by path, in each test anew."""

    FILES: dict[str, str] = {}

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in self.FILES.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
