"""scripts/check_code_blocks.py: blocks that are right pass, and each kind of mistake is found at its line."""

import unittest

from small_repository import SmallRepository  # first, because it finds the scripts

from check_code_blocks import Given, faults

FILES = {
    "include/ferry/ferry.hpp": "inline int answer() { return 42; }\n",
    "CMakeLists.txt": "option(FERRY_CUDA)\n",
    "frame.cpp": "#include <ferry/ferry.hpp>\nint main() {\n  // BLOCK\n}\n",
    "frame.py": "def body():\n    # BLOCK\n    return x\n\n\nbody()\n",
    "without_place.py": "pass\n",
    "of_torch.py": "# needs: no_such_module\n# BLOCK\n",
    "scripts/gpu": "#!/bin/sh\necho 'build  builds'\n",
    "scripts/first.py": "",
    "ferry": "#!/bin/sh\necho '  --ranks INT'\n",
}


class CodeBlocksTest(SmallRepository):
    FILES = FILES

    def setUp(self):
        super().setUp()
        for name in FILES:
            (self.root / name).chmod(0o755)

    def found(self, block):
        (self.root / "README.md").write_text(f"# Title\n\n{block}\n")
        return "\n".join(faults(Given(self.root, package=self.root, program=self.root / "ferry")))

    def test_right_blocks_pass(self):
        for block in ("<!-- code:frame.cpp -->\n```cpp\nreturn answer();\n```",
                      "<!-- code:frame.py -->\n```python\nx = 1\n```",
                      "```python\nprint(1)\n```",
                      "<!-- code:of_torch.py -->\n```python\nundefined()\n```",
                      "```sh\nFERRY_SEED=1 ferry run --ranks 2 && python scripts/first.py  # a remark\n./scripts/gpu build bench\n```",
                      "```sh\ncmake -S . -D FERRY_CUDA=ON \\\n      -B build\n```",
                      "<!-- code:in CMakeLists.txt -->\n```cmake\noption(FERRY_CUDA)\n```",
                      "<!-- code:in frame.cpp -->\n```cuda\nint main() {\n// ...\n}\n```",
                      "```text\na picture\n```",
                      "<!-- file:frame.py -->\n```python\nnot Python\n```\n<!-- /file -->"):
            self.assertEqual(self.found(block), "", block)

    def test_a_file_without_its_block_is_found(self):
        frame = self.root / "tests/documents/frame.cpp"
        frame.parent.mkdir(parents=True)
        frame.write_text(FILES["frame.cpp"])
        self.assertEqual(self.found("text"), "tests/documents/frame.cpp: no document has a block of it")
        self.assertEqual(self.found("<!-- code:tests/documents/frame.cpp -->\n```cpp\nreturn answer();\n```"), "")

    def test_mistakes_are_found(self):
        for block, message in {
                "```\nx\n```": "README.md:3: a block of language ''",
                "- item\n\n  ```sh\n  true\n  ```": "README.md: a fence is indented",
                "~~~\nx\n~~~": "README.md: a fence is indented",
                "```sh\ntrue": "has no end",
                "```rust\nx\n```": "language 'rust'",
                "<!-- code:frame.cpp -->\n```cpp\nreturn question();\n```": "README.md:4:",
                "<!-- code:none.cpp -->\n```cpp\n```": "none.cpp",
                "```python\nx =\n```": "invalid syntax",
                "<!-- code:frame.py -->\n```python\ny = 1\n```": "name 'x' is not defined",
                "<!-- code:of_torch.py -->\n```python\nx =\n```": "invalid syntax",
                "```python\nraise SystemExit(3)\n```": "exit status 3",
                "<!-- code:without_place.py -->\n```python\n```": "without_place.py needs one line",
                "```sh\nif true\n```": "syntax error",
                "```sh\n./scripts/gone 1\n```": "there is no ./scripts/gone",
                "```sh\nmake && ./scripts/gpu bulid\n```": "scripts/gpu has no part bulid",
                "```sh\ncmake -D FERRY_CUDDA=ON\n```": "CMakeLists.txt has no option FERRY_CUDDA",
                "```sh\nferry run --rank 2\n```": "ferry run has no option --rank",
                "<!-- code:in CMakeLists.txt -->\n```cmake\noption(FERRY)\n```": "CMakeLists.txt has no line 'option(FERRY)'",
                "<!-- code:in frame.cpp -->\n```cuda\nint mine() {\n```": "frame.cpp has no line 'int mine() {'",
                "```cuda\nint main() {\n```": "name the file",
        }.items():
            self.assertIn(message, self.found(block), block)


if __name__ == "__main__":
    unittest.main()
