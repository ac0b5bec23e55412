"""docs/interfaces.md: its rules and its tables of exceptions name what the headers and the Python stub declare, all of C and of the main classes."""

import ast
import pathlib
import re
import unittest

import ferry

REPOSITORY = pathlib.Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs/interfaces.md").read_text(encoding="utf-8")
TYPES_PAGE = re.search(r"\n## Types\n.*?(?=\n## )", PAGE, re.DOTALL)[0]
EXCEPTIONS = PAGE[PAGE.index(TYPES_PAGE):]  # before it stand the rules


def rows_of(page):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")]


def columns_of(rows):
    """The names in the columns of C++, C and Python."""
    return [{name for row in rows for name in re.findall(r"`([^`]+)`", row[column])} for column in range(3)]


ROWS = rows_of(EXCEPTIONS.replace(TYPES_PAGE, ""))
TYPES_CPP, TYPES_C, TYPES_PYTHON = columns_of(rows_of(TYPES_PAGE))
CPP, C, PYTHON = columns_of(ROWS)

# Layers in namespaces of their own, which have classes of the same names.
LAYERS = {"max": {"max.hpp"}, "nvfuser": {"nvfuser.hpp"}}
LAYER_HEADERS = set().union(*LAYERS.values())
HEADERS = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "include/ferry").glob("*.hpp")}
C_HEADERS = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "include/ferry/c").glob("*.h"))
STUB = ast.parse(pathlib.Path(ferry.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))

# Classes whose every public function is in the table, and what of them is not meant for callers.
WHOLE_CPP = {"Group": {"Group"}, "Rank": {"Rank", "state"}, "Exchange": set(), "Plan": {"Plan"}}
WHOLE_PYTHON = ["Group", "Rank", "Exchange", "Plan", "Placement"]
HEADER_OF = {"Group": "group.hpp", "Rank": "group.hpp", "Exchange": "exchange.hpp", "Plan": "plan.hpp"}


def public_part(header, name):
    """The public declarations of a class, without comments and bodies."""
    text = re.search(rf"class {name} \{{(.*?)\n\}};", HEADERS[header], re.DOTALL)[1]
    text = re.sub(r"//[^\n]*", "", text).split("private:")[0]
    text = re.sub(r"\([^()]*\)(?:\s*:[^{;]*)?\s*(const|noexcept)*\s*\{[^{}]*\}", "();", text)
    return re.sub(r"=\s*(delete|default);", ";", text)


def c_type(name):
    return "ferry_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def c_function(owner, name, layer=""):
    """What the rules call a function of a class in C."""
    lifetime = {owner: "create", "~" + owner: "destroy"}
    prefix = layer + "_" if layer else ""
    if name in lifetime:
        return f"ferry_{prefix}{owner.lower()}_{lifetime[name]}"
    return f"ferry_{prefix}{name}" if owner == "Exchange" else f"{c_type(owner)}_{name}"


def functions_of(header, name):
    found = set(re.findall(r"(~?\b\w+)\(", public_part(header, name)))
    return found - {"void"}  # of std::function<void(Rank)>


DECLARED_C = set(re.findall(r"^(?:ferry_status|int|void|const char\*) (ferry_\w+)\(", C_HEADERS, re.MULTILINE))

# Structs of C++ and what C has of their fields: the struct of C, and names that differ (None: another form, which the headers say).
FIELDS = [
    ("Config", ["ferry_config"], {"placement": "expert_rank", "own_receive_buffers": "external_receive_buffers",
                                  "check_calls": "manual_check"}),
    ("Format", ["ferry_format"], {"fp8": "flags", "mx": "flags", "nvfp4_options": "flags", "registered": "flags"}),
    ("EncoderCall", ["ferry_encoder_call"], {}),
    ("Encoder", ["ferry_encoder"], {}),
    ("Sizes", ["ferry_sizes"], {}),
    ("CallOptions", ["ferry_call_options"], {}),
    ("Tokens", ["ferry_tokens"], {}),
    ("AllGather", ["ferry_all_gather_v_args"], {}),
    ("ReduceScatter", ["ferry_reduce_scatter_v_args"], {}),
    ("ReceiveBuffers", ["ferry_receive_buffers"], {}),
    ("ReceivedPart", ["ferry_received_part"], {}),
    ("DispatchResult", ["ferry_dispatch_result"], {}),
    ("DispatchOptions", ["ferry_dispatch_args"], {}),
    ("CombineOptions", ["ferry_combine_args"], {}),
    ("DispatchCounts", ["ferry_dispatch_counts_result"], {}),
    ("StepMetadata", ["ferry_step_metadata"], {}),
    ("LoadCounts", ["ferry_counts"], {}),
    ("WireCounts", ["ferry_counts"], {"between_nodes": "dispatch_bytes_between_nodes"}),
    ("WaitTimes", ["ferry_counts"], {"dispatch": "dispatch_waits", "combine": "combine_waits"}),
    ("Bootstrap", ["ferry_bootstrap"], {}),
    ("EngineFunctions", ["ferry_engine_functions"], {"ordered_lanes": "unordered_lanes"}),
    # ferry_error_record.wait_via, wait_role and wait_node
    ("WaitRecord", ["ferry_wait_record"], {"via": None, "role": None, "node": None}),
    ("Trace", ["ferry_trace_info"], {}),
    ("PartitionSpec", ["ferry_trace_partition_args"], {}),
    ("LoadStatistics", ["ferry_load_statistics"], {}),
]


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


def fields_of_cpp(name):
    # Call shapes of other systems have structs of the same names.
    core = [text for header, text in HEADERS.items() if header not in LAYER_HEADERS]
    body = next(found[1] for text in core if (found := re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)))
    body = without_comments(body)
    while "<" in body:
        body = re.sub(r"<[^<>]*>", "", body)
    statements, depth, current = [], 0, ""
    for character in body:
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(character, 0)
        current += character
        if depth == 0 and (character == ";" or (character == "}" and "(" in current.split("{")[0])):
            statements.append(current.strip(" \n;"))
            current = ""
    names = set()
    for statement in statements:
        if "(" in statement.split("=")[0] or "operator" in statement or statement.startswith(("friend", "static")):
            continue  # a function
        plain = re.sub(r"=[^,]*", "", re.sub(r"\{[^{}]*\}", "", statement))
        names |= {declared.split()[-1].strip("*&") for declared in plain.split(",")}
    return names


def fields_of_c(name):
    body = without_comments(re.search(rf"typedef struct {name} \{{(.*?)\n\}} {name};", C_HEADERS, re.DOTALL)[1])
    names = set()
    for statement in body.split(";"):
        pointer = re.search(r"\(\*(\w+)\)", statement)
        names |= {pointer[1]} if pointer else set(re.findall(r"(\w+)(?:\[\w+\])?\s*(?:,|$)", statement.strip()))
    return names


class InterfacesTest(unittest.TestCase):
    def test_the_structs_of_c_have_the_fields_of_cpp(self):
        for cpp, structs, renamed in FIELDS:
            with self.subTest(struct=cpp):
                fields = fields_of_cpp(cpp)
                self.assertGreater(len(fields), 1)
                self.assertLessEqual(set(renamed), fields)
                expected = {renamed.get(field, field) for field in fields} - {None}
                self.assertLessEqual(expected, set().union(*map(fields_of_c, structs)))

    def test_python_has_the_settings_of_cpp(self):
        config = next(node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == "Config")
        constructor = next(node for node in config.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        self.assertEqual({argument.arg for argument in constructor.args.kwonlyargs}, fields_of_cpp("Config"))

    def test_every_type_of_a_call_has_its_names_by_a_rule_or_the_table(self):
        core = "\n".join(HEADERS[header] for header in HEADERS if header not in ("max.hpp", "nvfuser.hpp"))
        declared = set(re.findall(r"^(?:struct|class) (\w+)(?: final)?(?: : [^{]*)? \{", core, re.MULTILINE))
        self.assertLessEqual(TYPES_CPP, declared)
        ruled = declared - TYPES_CPP
        declared = {name for name in re.findall(r"^typedef struct \w+ (?:\{.*?\} )?(ferry_\w+);", C_HEADERS, re.MULTILINE | re.DOTALL)
                    if not name.startswith(("ferry_max_", "ferry_nvfuser_"))}
        # Arguments of the calls whose options C++ has among the parameters.
        parameters = {"ferry_combine_backward_args", "ferry_route_values_args", "ferry_return_values_args", "ferry_dispatch_counts_args"}
        self.assertEqual(TYPES_C | {c_type(name) for name in ruled}, declared - parameters)
        module = (REPOSITORY / "python/ferry/__init__.py").read_text(encoding="utf-8")
        public = set(re.findall(r'^    "([A-Z]\w*[a-z]\w*)",$', module, re.MULTILINE))
        self.assertEqual(TYPES_PYTHON | ruled, public)

    def test_the_table_has_four_columns(self):
        for row in ROWS:
            self.assertEqual(len(row), 4, row)

    def test_every_name_of_cpp_is_declared(self):
        for name in CPP:
            with self.subTest(name=name):
                layer, _, rest = name.partition("::")
                chosen = LAYERS[layer] if layer in LAYERS else HEADERS.keys() - LAYER_HEADERS
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

    def by_rule(self):
        """Functions of the main classes of C++ that the table leaves to the rules: class and name."""
        return {(owner, name) for owner, header in HEADER_OF.items() for name in functions_of(header, owner) - WHOLE_CPP[owner]
                if f"{owner}::{name}" not in CPP}

    def test_every_function_of_c_has_its_name_by_a_rule_or_the_table(self):
        self.assertLessEqual(C, DECLARED_C)
        ruled = {c_function(owner, name) for owner, name in self.by_rule()} | {"ferry_placement_blocks"}
        ruled |= {c_function("Exchange", name, layer) for layer in LAYERS for name in functions_of(f"{layer}.hpp", "Exchange")}
        core = "\n".join(HEADERS.values())
        for name in DECLARED_C - C - ruled:
            with self.subTest(name=name):
                function = name.removeprefix("ferry_").removeprefix("max_")
                self.assertTrue(re.search(rf"^[\w:<>&* ]*\b{function}\(", core, re.MULTILINE), "neither in the table nor by a rule")

    def test_the_main_classes_of_cpp_are_in_c_and_python(self):
        python = {f"{node.name}.{each.name}" for node in STUB.body if isinstance(node, ast.ClassDef)
                  for each in node.body if isinstance(each, ast.FunctionDef)}
        for owner, name in sorted(self.by_rule()):
            with self.subTest(name=f"{owner}::{name}"):
                self.assertIn(c_function(owner, name), DECLARED_C)
                self.assertIn(f"{owner}.{ {owner: '__init__', '~' + owner: 'destroy'}.get(name, name)}", python)

    def test_the_main_classes_of_python_are_complete(self):
        classes = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
        ruled = {f"{owner}.{name}" for owner, name in self.by_rule()} | {"Exchange.destroy", "Placement.blocks"}
        for name in WHOLE_PYTHON:
            with self.subTest(name=name):
                declared = {f"{name}.{node.name}" for node in classes[name].body if isinstance(node, ast.FunctionDef)
                            and not node.name.startswith("__")}
                listed = {entry for entry in PYTHON if entry.startswith(name + ".")}
                self.assertEqual(listed | {entry for entry in ruled if entry.startswith(name + ".") and entry in declared}, declared)
                self.assertLessEqual(declared - listed, ruled)

    def test_every_name_of_python_is_declared(self):
        declared = {node.name for node in STUB.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        declared |= {f"{c.name}.{f.name}" for c in STUB.body if isinstance(c, ast.ClassDef)
                     for f in c.body if isinstance(f, ast.FunctionDef)}
        self.assertLessEqual(PYTHON, declared)
