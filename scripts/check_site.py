#!/usr/bin/env python3
"""Checks the pages of the documentation site in FOLDER: no emphasis begins or ends within a word or beside a bracket. There Markdown has taken
the asterisks of a formula for emphasis and does not show them: write the formula as code.

usage: check_site.py FOLDER
"""

import html
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


def main():
    found = [f"{path}: emphasis within a formula: {text}" for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.html"))
             for text in lost_asterisks(path.read_text())]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
