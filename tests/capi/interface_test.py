"""The C interface is the recorded one: functions, constants and the fields of structs as interface.txt has them, and the libraries export
these functions. Arguments: the shared libraries. With --record, writes interface.txt in place of comparing; docs/versioning.md says what
may change when."""

import pathlib
import re
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE / "interface.txt"
HEADERS = sorted((HERE.parents[1] / "include/ferry/c").glob("*.h"))


def declarations(text):
    """The declarations of a header, one a line, without comments; constants and fields have a line each."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    lines = re.findall(r"^#define (FERRY_\w+ .+)$", text, re.MULTILINE)
    text = " ".join(re.sub(r"^#[^\n]*(?:\\\n[^\n]*)*", "", text, flags=re.MULTILINE).split())
    for statement in re.findall(r"(?:[^;{}]|\{[^{}]*\})+;", text):
        opened = re.fullmatch(r"\s*(?:typedef )?(struct|enum)[^{]*\{(.*)\}\s*(\w*);", statement)
        if opened:
            parts = opened[2].split(";" if opened[1] == "struct" else ",")
            lines += [f"{opened[1]} {opened[3]}: {part.strip()}" for part in parts if part.strip()]
        else:
            lines.append(statement.strip())
    return lines


INTERFACE = [f"{header.name}: {line}" for header in HEADERS for line in declarations(header.read_text(encoding="utf-8"))]


class InterfaceTest(unittest.TestCase):
    maxDiff = None

    def test_declarations_are_the_recorded_ones(self):
        self.assertEqual(RECORD.read_text(encoding="utf-8").splitlines(), INTERFACE)

    def test_libraries_export_the_functions(self):
        declared = {name for line in INTERFACE for name in re.findall(r"^\w+\.h: (?!typedef)[\w* ]+?\b(ferry_\w+)\(", line)}
        self.assertGreater(len(declared), 70)
        listed = subprocess.run(["nm", "-D", "--defined-only", *LIBRARIES], check=True, capture_output=True, text=True).stdout
        # The caller's library defines ferry_formats.
        self.assertEqual(set(re.findall(r" T (ferry_\w+)$", listed, re.MULTILINE)), declared - {"ferry_formats"})


if __name__ == "__main__":
    LIBRARIES = sys.argv[1:]
    if LIBRARIES == ["--record"]:
        RECORD.write_text("\n".join(INTERFACE) + "\n", encoding="utf-8")
    else:
        unittest.main(argv=sys.argv[:1])
