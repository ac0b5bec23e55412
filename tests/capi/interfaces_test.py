"""docs/interfaces.md names what the headers and the Python stub declare, and leaves out nothing of C, and of the main classes."""

import ast
import pathlib
import re
import unittest

REPOSITORY = pathlib.Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/interfaces.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
CPP, C, PYTHON = ({cell.strip("`") for row in ROWS for cell in row[column:column + 1] if cell.startswith("`")}
                  for column in range(3))

# Layers in namespaces of their own, which have classes of the same names.
LAYERS = {"max": "max.hpp", "nvfuser": "nvfuser.hpp"}
HEADERS = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "include/ferry").glob("*.hpp")}
C_HEADERS = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "include/ferry/c").glob("*.h"))
STUB = ast.parse((REPOSITORY / "python/ferry/_core.pyi").read_text(encoding="utf-8"))

# Classes whose every public function is in the table, and what of them is not meant for callers.
WHOLE_CPP = {"Group": {"Group"}, "Rank": {"Rank", "state"}, "Exchange": set(), "Plan": {"Plan"}}
WHOLE_PYTHON = ["Group", "Rank", "Exchange", "Plan", "Placement"]


def public_part(header, name):
    """The public declarations of a class, without comments and bodies."""
    text = re.search(rf"class {name} \{{(.*?)\n\}};", HEADERS[header], re.DOTALL)[1]
    text = re.sub(r"//[^\n]*", "", text).split("private:")[0]
    text = re.sub(r"\([^()]*\)(?:\s*:[^{;]*)?\s*(const|noexcept)*\s*\{[^{}]*\}", "();", text)
    return re.sub(r"=\s*(delete|default);", ";", text)


def functions_of(header, name):
    found = set(re.findall(r"(~?\b\w+)\(", public_part(header, name)))
    return found - {"void"}  # of std::function<void(Rank)>


class InterfacesTest(unittest.TestCase):
    def test_the_table_has_four_columns(self):
        for row in ROWS:
            self.assertEqual(len(row), 4, row)

    def test_every_name_of_cpp_is_declared(self):
        for name in CPP:
            with self.subTest(name=name):
                layer, _, rest = name.partition("::")
                chosen = {LAYERS[layer]} if layer in LAYERS else HEADERS.keys() - set(LAYERS.values())
                headers = {header: HEADERS[header] for header in chosen}
                owner, _, function = (rest if layer in LAYERS else name).rpartition("::")
                text = "\n".join(headers.values())
                if "(" in name:
                    self.assertTrue(name in text, "declared nowhere")
                elif owner:
                    header = next(h for h, body in headers.items() if re.search(rf"(class|struct) {owner} \{{", body))
                    body = re.search(rf"(class|struct) {owner} \{{(.*?)\n\}};", headers[header], re.DOTALL)[2]
                    self.assertTrue(re.search(re.escape(function) + r"\(", body), "declared nowhere")
                else:
                    self.assertTrue(re.search(rf"\b{function}\(", text), "declared nowhere")

    def test_every_function_of_c_is_in_the_table(self):
        declared = set(re.findall(r"^(?:ferry_status|int|void|const char\*) (ferry_\w+)\(", C_HEADERS, re.MULTILINE))
        self.assertEqual(C, declared)

    def test_the_main_classes_of_cpp_are_complete(self):
        for header, name in (("group.hpp", "Group"), ("group.hpp", "Rank"), ("exchange.hpp", "Exchange"), ("plan.hpp", "Plan")):
            with self.subTest(name=name):
                listed = {entry.split("::")[1] for entry in CPP if entry.startswith(name + "::")}
                self.assertEqual(listed, functions_of(header, name) - WHOLE_CPP[name])

    def test_the_main_classes_of_python_are_complete(self):
        classes = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
        for name in WHOLE_PYTHON:
            with self.subTest(name=name):
                declared = {f"{name}.{node.name}" for node in classes[name].body if isinstance(node, ast.FunctionDef)
                            and not node.name.startswith("__")}
                listed = {entry for entry in PYTHON if entry.startswith(name + ".") and "__" not in entry}
                self.assertEqual(listed, declared)

    def test_every_name_of_python_is_declared(self):
        declared = {node.name for node in STUB.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        declared |= {f"{c.name}.{f.name}" for c in STUB.body if isinstance(c, ast.ClassDef)
                     for f in c.body if isinstance(f, ast.FunctionDef)}
        self.assertLessEqual(PYTHON, declared)


if __name__ == "__main__":
    unittest.main()
