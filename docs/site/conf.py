"""Configuration of the documentation site: scripts/site builds it from docs/, README.md and CHANGELOG.md."""

import os
import pathlib
import re

import ferry
from sphinx import addnodes
from sphinx.domains.c import CDomain
from sphinx.domains.cpp import CPPDomain

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

project = "Ferry"
author = copyright = "the Ferry developers"
release = re.search(r"project\(ferry VERSION ([\d.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
breathe_projects = {"ferry": os.environ["FERRY_SITE_XML"]}  # the public headers, read by Doxygen
breathe_default_project = "ferry"
breathe_domain_by_extension = {"h": "c"}
breathe_show_include = False
suppress_warnings = ["duplicate_declaration.cpp"]  # every header opens the namespace
myst_heading_anchors = 4  # links to headings, as in the repository
html_theme = "furo"
html_title = f"Ferry {release}"
html_show_sphinx = False
html_favicon = "favicon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
autodoc_member_order = "bysource"

# The order of the Python reference: a program meets these names first, errors last. Modules have pages of their own, and some need PyTorch.
FIRST = ["Group", "Rank", "Exchange", "Config", "DispatchResult", "ReceiveBuffers", "Plan"]
LAST = ["Error", *sorted(name for name in ferry.__all__ if name.endswith("Error") and name != "Error")]
MODULES = ["deep_ep", "max", "megatron", "nvfuser", "torch"]
ferry.__all__ = FIRST + [name for name in ferry.__all__ if name not in FIRST + LAST + MODULES] + LAST
maximum_signature_line_length = 100


def static_method(function):
    """A Python function with the documentation of a compiled one, which Sphinx takes for a value."""
    def documented():
        pass

    documented.__name__, documented.__doc__ = function.__name__, function.__doc__
    return staticmethod(documented)


for class_ in (value for value in map(vars(ferry).get, ferry.__all__) if isinstance(value, type)):
    for name, value in list(vars(class_).items()):
        if type(value).__name__ == "nb_func" and not name.startswith("_"):
            setattr(class_, name, static_method(value))

# Pages that are a document of the repository's root.
FROM_ROOT = {"site/overview": "README.md", "site/changes": "CHANGELOG.md", "site/contributing": "CONTRIBUTING.md"}
PAGE_OF = {document: f"docs/{page}.md" for page, document in FROM_ROOT.items()}


def put_document_first(app, docname, source):
    if docname not in FROM_ROOT:  # links to these documents, which on the site lie elsewhere
        folder = pathlib.PurePath(docname).parent
        for page, document in FROM_ROOT.items():
            source[0] = source[0].replace(f"]({os.path.relpath('..', folder)}/{document}", f"]({os.path.relpath(page, folder)}.md")
        return
    folder = (REPOSITORY / "docs" / docname).parent

    def moved(match):
        target, anchor = match[1], match[2] or ""
        to = REPOSITORY / PAGE_OF.get(target, target)
        return f"]({os.path.relpath(to, folder)}{anchor})" if target else match[0]

    text = (REPOSITORY / FROM_ROOT[docname]).read_text()
    source[0] = re.sub(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)", moved, text) + source[0]


def keep_logs_apart(app, docname, source):
    """Logs have pages, to which others link, but no place in the navigation and in the search."""
    if docname.startswith("log/"):
        source[0] = "---\norphan: true\nnosearch: true\n---\n" + source[0]


def keep_units_beside_numbers(app, docname, source):
    """In tables, whose cells are narrow on a phone, a number and its unit stay on one line."""
    source[0] = re.sub(r"^\|.*$", lambda row: re.sub(r"(?<=\d) (?=(us|ms|s|kB|MB|GB|TB|SMs)\b)", "\u00a0", row[0]), source[0], flags=re.MULTILINE)


# What is shown of a header: no private members and no operators.
SECTIONS = ("briefdescription detaileddescription innernamespace innerclass define enum func public-attrib public-func public-static-func "
            "typedef var")
# Pages whose list of contents is the comment of a header that includes all others.
UMBRELLAS = {"site/cpp": "ferry.hpp", "site/c": "ferry.h"}


def add_headers(app, docname, source):
    """A section for each header that the comment of an umbrella lists: its words there, and what Doxygen has read."""
    if docname not in UMBRELLAS:
        return
    text = (REPOSITORY / "include/ferry" / UMBRELLAS[docname]).read_text()
    for name, words in re.findall(r"^//   (\S+\.h(?:pp)?)  +(.+)$", text, re.MULTILINE):
        file = pathlib.PurePath(name).name
        source[0] += (f"\n## {file}\n\n{words[0].upper()}{words[1:]}.\n\n"
                      f"```{{doxygenfile}} {file}\n:sections: {SECTIONS}\n```\n")


def show_declarations(app, doctree):
    """Declarations stand without their namespace around them, and enumerators and fields not in the list of contents."""
    for node in list(doctree.findall(addnodes.desc)):
        if node.astext().startswith("namespace "):
            node.replace_self(node[-1].children)
        elif node["objtype"] in ("enumerator", "member", "var"):
            node[0]["_toc_name"] = ""


def without_parameters(domain):
    """The domain, without the parameters of functions in its index: the search would list them beside each function."""
    def get_objects(self):
        return (each for each in domain.get_objects(self) if not each[2].endswith("Param"))

    return type(domain.__name__, (domain,), {"get_objects": get_objects})


def as_rst(paragraph):
    """A paragraph of a docstring, which is plain text. Tables and code are shown as they are written."""
    lines = paragraph.split("\n")
    if any(line.startswith(" ") or re.search(r"\S {2,}\S", line) for line in lines):
        return "\n".join([".. code-block:: text", "", *("   " + line for line in lines)])
    pieces = re.split(r"(`[^`]+`)", paragraph)
    plain = [re.sub(r"([\\*_|])", r"\\\1", piece) for piece in pieces[0::2]]
    code = [f"`{piece}`" for piece in pieces[1::2]]
    return "".join(text for pair in zip(plain, [*code, ""]) for text in pair)


def keep_plain_text(app, what, name, object_, options, lines):
    paragraphs = "\n".join(lines).strip("\n").split("\n\n")
    lines[:] = "\n\n".join(as_rst(each) for each in paragraphs if each).split("\n") + [""]


def setup(app):
    for domain in (CDomain, CPPDomain):
        app.add_domain(without_parameters(domain), override=True)
    app.connect("source-read", put_document_first)
    app.connect("source-read", keep_units_beside_numbers)
    app.connect("source-read", keep_logs_apart)
    app.connect("source-read", add_headers)
    app.connect("doctree-read", show_declarations, priority=400)  # before Sphinx makes the list of contents
    app.connect("autodoc-process-docstring", keep_plain_text)
