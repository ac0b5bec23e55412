#!/usr/bin/env python3
"""Checks the documentation site in FOLDER:

- No emphasis begins or ends within a word or beside a bracket. There Markdown has taken the asterisks of a formula for emphasis and does
  not show them: write the formula as code.
- The reference of Python shows no compiled function as a value, without its documentation.
- The search finds no page of a log, which a user does not need, and a call by its name in Python, C++ and C.

usage: check_site.py FOLDER
"""

import html
import json
import pathlib
import re
import sys

WITHIN_A_WORD = re.compile(r"(?<=[\w)\]])<(?:em|strong)>|</(?:em|strong)>(?=[\w(\[])")
TAG = re.compile(r"<[^>]*>")


def lost_asterisks(page):
    """The text around each place."""
    for found in WITHIN_A_WORD.finditer(page):
        around = page[max(0, found.start() - 40) : found.end() + 40]
        yield " ".join(html.unescape(TAG.sub("", around)).split())


def functions_as_values(page):
    """The names of functions that are shown as `name = <nanobind.nb_func object>`."""
    return re.findall(r"([\w.]+) = (?=<nanobind)", html.unescape(TAG.sub("", page)))


def searchable_logs(index):
    """The pages of logs that an index of Sphinx's search has words of: a page that is left out has no title there."""
    index = json.loads(index[index.index("{") : index.rindex("}") + 1])
    return [name for name, title in zip(index["docnames"], index["titles"], strict=True) if name.startswith("log/") and title]


def missing_names(index, wanted=("ferry.Exchange.dispatch_send", "ferry::Exchange::dispatch_send", "ferry_dispatch_send")):
    """Those of the names that the search does not find as declarations."""
    objects = json.loads(index[index.index("{") : index.rindex("}") + 1])["objects"]
    found = {f"{folder}.{entry[-1]}".lstrip(".") for folder, entries in objects.items() for entry in entries}
    return [name for name in wanted if name not in found]


def main():
    found = []
    for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.html")):
        page = path.read_text()
        found += [f"{path}: emphasis within a formula: {text}" for text in lost_asterisks(page)]
        found += [f"{path}: {name} is shown as a value" for name in functions_as_values(page)]
    index = (pathlib.Path(sys.argv[1]) / "searchindex.js").read_text()
    found += [f"the search finds {name}" for name in searchable_logs(index)]
    found += [f"the search does not find {name}" for name in missing_names(index)]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
