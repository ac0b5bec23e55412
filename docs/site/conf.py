"""Configuration of the documentation site: scripts/site builds it from docs/, README.md and CHANGELOG.md."""

import os
import pathlib
import re

import ferry

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

project = "Ferry"
author = copyright = "the Ferry developers"
release = re.search(r"project\(ferry VERSION ([\d.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4  # links to headings, as in the repository
html_theme = "furo"
html_title = f"Ferry {release}"
html_show_sphinx = False
html_extra_path = [os.environ["FERRY_SITE_EXTRA"]]  # the C++ reference, made by Doxygen
autodoc_member_order = "bysource"

# Modules have pages of their own, and some need PyTorch.
ferry.__all__ = [name for name in ferry.__all__ if name not in ("deep_ep", "max", "megatron", "nvfuser", "torch")]

# Pages that begin with a document of the repository's root.
FROM_ROOT = {"index": "README.md", "site/changes": "CHANGELOG.md", "site/contributing": "CONTRIBUTING.md"}
PAGE_OF = {document: f"docs/{page}.md" for page, document in FROM_ROOT.items()}


def put_document_first(app, docname, source):
    if docname not in FROM_ROOT:
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
    app.connect("source-read", put_document_first)
    app.connect("source-read", keep_logs_apart)
    app.connect("autodoc-process-docstring", keep_plain_text)
