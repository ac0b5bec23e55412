#!/usr/bin/env python3
"""Compiles or runs the code blocks of the documents, *.md and docs/**/*.md, each by its language.

cpp      compiled with the public headers, not run
python   run if --package names the folder of a built package, otherwise compiled
sh       parsed, not run, since it installs or measures; files, parts of scripts/gpu and scripts/test, and FERRY_ options of
         CMake must exist, and options of `ferry`, if --program names it
cmake    a project, configured with a stand-in for the installed package; with the mark <!-- code:in PATH -->, lines of that file
cuda     lines of a file, with that mark
text     not code

A block that is a part of a program has the mark <!-- code:PATH --> in the line before it: the file PATH, in which a line that
holds only BLOCK behind a comment sign stands for the block, is compiled or run. A Python file that says `needs: MODULE` is only
compiled where that module is not installed. Blocks that quote a file are checked by scripts/check_documents.py.
"""

import argparse
import functools
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import typing

import check_documents

REPOSITORY = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^(?:<!-- code:(.*?) -->\n)?```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STRAY_FENCE = re.compile(r"^\s*(```|~~~)", re.MULTILINE)
PLACE = re.compile(r"^( *)(?://|#) BLOCK\n", re.MULTILINE)
OWN_FILE = re.compile(r"(\./)?(scripts|bench|examples|python|tests)/")
FRAMES = "tests/documents"
WITH_PARTS = ("scripts/gpu", "scripts/test")


class Given(typing.NamedTuple):
    root: pathlib.Path
    package: typing.Optional[pathlib.Path] = None
    program: typing.Optional[pathlib.Path] = None
    compiler: str = "g++"
    language: typing.Optional[str] = None


def in_frame(given, mark, code):
    """The block inside the file that its mark names, or alone."""
    if not mark:
        return code
    frame = (given.root / mark).read_text()
    if len(PLACE.findall(frame)) != 1:
        raise ValueError(f"{mark} needs one line that holds only BLOCK behind a comment sign")
    return PLACE.sub(lambda place: "".join(place[1] * bool(line.strip()) + line for line in code.splitlines(keepends=True)), frame)


def run(command, **more):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, **more)
    return done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else None


def check_cpp(given, mark, code):
    command = [given.compiler, "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", "-I", given.root / "include", "-x", "c++", "-"]
    return run(command, input=in_frame(given, mark, code))


def check_python(given, mark, code):
    whole = in_frame(given, mark, code)
    compile(whole, mark or "block", "exec")
    needs = re.findall(r"needs: (\w+)", whole)
    if not given.package or not all(importlib.util.find_spec(name) for name in needs):
        return None
    paths = [str(given.package), str(given.root / "python/deep_ep"), os.environ.get("PYTHONPATH", "")]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:  # tracebacks show lines of a file
        program.write(whole)
        program.flush()
        return run([sys.executable, "-B", program.name], env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


@functools.lru_cache(maxsize=None)
def printed_by(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def commands(code):
    """The words of each simple command of a shell block."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield [word for index, word in enumerate(words[:end]) if not (index == 0 and re.match(r"[A-Z_]+=", word))]
            words = words[end + 1:]


def check_words(given, words):
    for word in words:
        if OWN_FILE.match(word) and not (given.root / word).exists():
            yield f"there is no {word}"
    for name in re.findall(r"(?:-D |define\.)(FERRY_\w+)", " ".join(words)):
        if name not in (given.root / "CMakeLists.txt").read_text():
            yield f"CMakeLists.txt has no option {name}"
    if not words:
        return
    script = words[0].removeprefix("./")
    if script in WITH_PARTS:
        listed = {line.split()[0] for line in printed_by(str(given.root / script), "--list").splitlines()} | {"bench"}
        for part in words[1:]:
            if not part.startswith("-") and part not in listed:
                yield f"{script} has no part {part}"
    if script == "ferry" and given.program:
        subcommand = words[1:3] if words[1:2] == ["trace"] else words[1:2]
        known = re.findall(r"--[\w-]+", printed_by(str(given.program), *subcommand, "--help"))
        for option in words:
            if option.startswith("--") and option not in known:
                yield f"ferry {' '.join(subcommand)} has no option {option}"


def check_sh(given, mark, code):
    wrong = run(["bash", "-n"], input=code)
    return wrong or "; ".join(problem for words in commands(code) for problem in check_words(given, words))


def configured(given, code):
    with tempfile.TemporaryDirectory() as folder:
        project = pathlib.Path(folder)
        (project / "CMakeLists.txt").write_text(code)
        (project / "engine.cpp").touch()
        libraries = [f"add_library(ferry::{name} INTERFACE IMPORTED)\n" for name in ("ferry", "shared")]
        (project / "ferry-config.cmake").write_text("".join(libraries))
        (project / "ferry-config-version.cmake").write_text("set(PACKAGE_VERSION_COMPATIBLE ON)\n")
        return run(["cmake", "-G", "Ninja", "-S", project, "-B", project / "build", "-D", f"ferry_DIR={folder}",
                    "-D", f"CMAKE_CXX_COMPILER={given.compiler}"])


def check_lines(given, mark, code):
    name = re.fullmatch(r"in (\S+)", mark or "")
    if not name:
        return "name the file that has these lines: <!-- code:in PATH -->"
    lines = {line.strip() for line in (given.root / name[1]).read_text().splitlines()} | {"...", "// ..."}
    missing = [line for line in code.splitlines() if line.strip() not in lines]
    return f"{name[1]} has no line '{missing[0]}'" if missing else None


def check_cmake(given, mark, code):
    return check_lines(given, mark, code) if mark else configured(given, code)


CHECKS = {"cpp": check_cpp, "python": check_python, "sh": check_sh, "cmake": check_cmake, "cuda": check_lines, "text": lambda *block: None}


def faults(given):
    unused = {str(path.relative_to(given.root)) for path in given.root.glob(FRAMES + "/*")}
    for path in check_documents.documents(given.root):
        text = check_documents.QUOTE.sub(lambda quote: "\n" * quote[0].count("\n"), path.read_text())
        for _ in STRAY_FENCE.finditer(BLOCK.sub("", text)):
            yield f"{path.relative_to(given.root)}: a fence is indented, is not of ``` or has no end, so its block cannot be checked"
        for block in BLOCK.finditer(text):
            mark, language, code = block.groups()
            unused.discard(mark)
            where = f"{path.relative_to(given.root)}:{text.count(chr(10), 0, block.start(2)) + 1}"
            if language.startswith("{") or given.language not in (None, language):  # { begins a directive of the documentation site
                continue
            if language not in CHECKS:
                yield f"{where}: a block of language '{language}'; known are {', '.join(CHECKS)}"
                continue
            try:
                wrong = CHECKS[language](given, mark, code)
            except (ValueError, OSError, SyntaxError, subprocess.SubprocessError) as error:
                wrong = str(error)
            if wrong:
                yield f"{where}: {wrong}"
    yield from (f"{name}: no document has a block of it" for name in sorted(unused))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="of the repository")
    parser.add_argument("--package", type=pathlib.Path, help="folder that holds the built package ferry")
    parser.add_argument("--program", type=pathlib.Path, help="the built program ferry")
    parser.add_argument("--compiler", default="g++", help="of C++ (default g++)")
    parser.add_argument("--language", choices=CHECKS, help="checks only the blocks of this language")
    found = list(faults(Given(**vars(parser.parse_args()))))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
