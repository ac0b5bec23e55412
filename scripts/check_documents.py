#!/usr/bin/env python3
"""Checks the documents, *.md, docs/**/*.md and those beside tests and records: every link leads somewhere, every table has its
heading, every quoted file is quoted exactly, the pages about the source name no file of code that does not exist, and no page takes much more than ten minutes: 4,000 words, without generated tables. Logs,
the changelog and the list of tests may be longer. --words prints the words of each page for users, and their sum.

A quoted file stands between <!-- file:PATH --> and <!-- /file -->, in a fenced block. With --write the quotes are
renewed from their files; otherwise a difference is an error, as is a link to a file or heading that does not exist.
"""

import argparse
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).parent.parent
QUOTE = re.compile(r"(<!-- file:(\S+) -->\n```\w*\n).*?(```\n<!-- /file -->)", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = re.compile(r"<!-- (results|plot|gpu-tests|scale|memory)\b.*?<!-- /\1 -->", re.DOTALL)
MOST_WORDS = 4000
LONG = ("CHANGELOG.md", "docs/log/", "bench/results/")
CODE_FILE = re.compile(r"`([\w/.-]+\.(?:hpp|cpp|cuh?|h|py|pml|\*))`")  # .*: a header and its source
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def documents(root):
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("tests/*/*.md"), *root.glob("bench/results/tests/*.md")])


def anchors(text):
    """The names that headings get: lower case, punctuation gone, spaces to hyphens."""
    titles = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def words(text):
    return len(GENERATED.sub("", text).split())


def is_for_users(name):
    return name in ("README.md", "SECURITY.md") or name.startswith("docs/") and not name.startswith("docs/log/")


def about_the_source(root):
    """The pages that the site has under "Source"."""
    index = root / "docs/index.md"
    listed = re.search(r":caption: Source\n(.*?)```", index.read_text() if index.exists() else "", re.DOTALL)
    return {f"docs/{name}.md" for name in (listed[1].split() if listed else ())}


def broken_links(path, text):
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = path.parent / name if name else path
        if not to.exists():
            yield f"link to {target}: there is no {name}"
        elif anchor and anchor not in anchors(to.read_text()):
            yield f"link to {target}: {to.name} has no such heading"


def headless_tables(text):
    """A table that an empty line has cut in two: its second half has no heading, and is shown as text."""
    lines = ["", *FENCE.sub("", text).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:]):
        if line.startswith("|") and line.endswith("|") and not before.startswith("|") and not re.fullmatch(r"\|[\s:|-]+\|", after):
            yield f"a table without a heading begins with {line[:60]}"


def missing_files(root, text):
    """The files of code that a page about the source names by the end of their paths, and that do not exist."""
    have = [str(path.relative_to(root)) for folder in ("src", "include", "python", "tools", "tests", "scripts") for path in root.glob(folder + "/**/*.*")]
    ends = {"/".join(parts[first:]) for parts in (path.split("/") for path in have) for first in range(len(parts))}
    ends |= {end.rpartition(".")[0] + ".*" for end in ends}
    return sorted({name for name in CODE_FILE.findall(text) if name not in ends})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the quotes")
    parser.add_argument("--words", action="store_true", help="print the words of the pages for users")
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="of the repository")
    given = parser.parse_args()
    found, counted = [], {}
    for path in documents(given.root):
        text = path.read_text()
        quoted = QUOTE.sub(lambda match: match[1] + (given.root / match[2]).read_text() + match[3], text)
        if quoted != text and given.write:
            path.write_text(quoted)
        name = str(path.relative_to(given.root))
        if quoted != text and not given.write:
            found.append(f"{name}: a quote is not what its file says: run scripts/check_documents.py --write")
        if words(text) > MOST_WORDS and not name.startswith(LONG):
            found.append(f"{name}: has {words(text):,} words, more than {MOST_WORDS:,}: split it, or move what a reader does not need")
        if is_for_users(name):
            counted[name] = words(text)
        if name in about_the_source(given.root) and (given.root / "src").exists():  # an installation has no sources
            found += [f"{name}: there is no file {missing}" for missing in missing_files(given.root, text)]
        found += [f"{name}: {problem}" for problem in [*broken_links(path, quoted), *headless_tables(quoted)]]
    if given.words:
        print(*(f"{count:6,} {name}" for name, count in counted.items()), sep="\n")
        source = sum(count for name, count in counted.items() if name in about_the_source(given.root))
        print(f"{sum(counted.values()):6,} in all, {source:,} of them about the source")
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
