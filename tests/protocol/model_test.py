"""usage: model_test.py quotes|model|mistakes|unchanged|record

Checks lane.pml: the code contains its quotes; its assertions hold in every state and no state is a deadlock; each seeded
mistake makes an assertion fail that is about it, or deadlocks.

`model` and `mistakes` take a minute and a half, and nothing but lane.pml and the lists below changes their outcome. So `record` runs
both and writes what they found to explored.json. `unchanged` fails if the model or the lists are not those of the record; it
explores the smallest size again and compares.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

MODEL = pathlib.Path(__file__).with_name("lane.pml")
RECORD = MODEL.with_name("explored.json")
SOURCES = MODEL.parents[2] / "src/backends/cuda"

# Sizes of the model. They cover: buffers of both parities written again, with two deviations at once, of one rank or two;
# direct writes with a deviation before, between or after; damaged plans of two ranks at once.
SIZES = [
    ["CALLS=5", "DEVIATIONS=2", "DIRECT_WRITES=0"],
    ["CALLS=4", "DEVIATIONS=0", "DIRECT_WRITES=3", "FEW=1"],
    ["CALLS=3", "DEVIATIONS=1", "DIRECT_WRITES=2"],
    ["CALLS=2", "DEVIATIONS=0", "DIRECT_WRITES=1", "DAMAGED=2", "FEW=1"],
]
SIZE_OF_MISTAKES = ["CALLS=5", "DEVIATIONS=1", "DIRECT_WRITES=2"]

# For each mistake, the variable in the assertion that must fail first, or a deadlock.
DEADLOCK = "invalid end state"
MISTAKES = {
    "FLAG_WITHOUT_RELEASE": "row",
    "NUMBER_AND_PAYLOAD_APART": "header",
    "END_OF_STREAM_WITHOUT_FENCE": "row_flag",
    "ONE_BUFFER_OF_HEADERS": "header",
    "ONE_BUFFER_OF_ROWS": "row",
    "ABORT_WITHOUT_ALL_HEADERS": "header",
    "REFUSAL_WITHOUT_ALL_HEADERS": "header",
    "END_OF_STREAM_BY_THE_FIRST_BLOCK": "row_flag",
    "END_OF_STREAM_AFTER_ROWS": DEADLOCK,
    "DIRECT_WRITE_BEFORE_HEADERS": "received",
    "DIRECT_WRITE_NOT_ALLOWED": "row",
    "DIRECT_ROW_WITHOUT_FLAG": "received",
    "HEADER_BEFORE_ROWS_ARE_READ": "received",
}


def explore(defines, optimisation):
    """Explores all states of the model, up to the first error; returns the output of Spin's verifier."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*command):
            return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout

        run("spin", *(f"-D{define}" for define in defines), "-a", str(MODEL))
        run("gcc", "-w", optimisation, "-DSAFETY", "-DMEMLIM=4000", "-o", "pan", "pan.c")
        return run("./pan", "-m10000", "-n", "-w25")  # 2^25 hash slots: enough for every size


def bodies(text, function):
    """The bodies of all functions with that name."""
    for definition in re.finditer(rf"\b{function}\((?:[^;{{}}]|\{{\}})*\{{\n", text):
        depth, end = 1, definition.end()
        while depth > 0:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield " ".join(text[definition.end() : end].split())


def check_quotes():
    model = MODEL.read_text()
    quotes = re.findall(r"([\w.]+\.cuh?) (\w+): `([^`]+)`", model)
    assert 2 * len(quotes) == model.count("`") > 0, "a quote is not of the form: file function: `code`"
    missing = []
    for file, function, quote in quotes:
        source = next(SOURCES.rglob(file), None)
        found = list(bodies(source.read_text(), function)) if source else []
        if not any(quote in body for body in found):
            missing.append(f"{file} {function} " + (f"does not contain: {quote}" if found else "does not exist"))
    assert not missing, "\n".join(["lane.pml quotes code that is not there:", *missing])
    print(len(quotes), "quotes found")


def states_of(size):
    """Explores a size, whose assertions must hold in every state; returns the number of states."""
    report = explore(size, "-O2")
    complete = "Search not completed" not in report and "max search depth" not in report
    assert complete and "errors: 0" in report, report
    states = int(re.search(r"(\d+) states, stored", report)[1])
    print(*size, f"{states} states", sep=", ")
    return states


def check_model():
    return {" ".join(size): states_of(size) for size in SIZES}


def check_mistakes():
    model = MODEL.read_text()
    assert set(re.findall(r"MISTAKE_([A-Z_]+)", model)) == set(MISTAKES), "lane.pml and this script list different mistakes"
    for mistake, variable in MISTAKES.items():
        size = SIZES[-1] if variable == DEADLOCK else SIZE_OF_MISTAKES
        report = explore([*size, f"MISTAKE_{mistake}"], "-O1")  # most searches take less time than the compiler
        failure = re.search(r"pan:1: (?:assertion violated \(+)?(\w[\w ]*\w).*", report)
        assert failure and failure[1] == variable, f"{mistake} was not caught:\n{report}"
        print(mistake, "is caught:", failure[0])


def described():
    """What decides the outcome of `model` and `mistakes`."""
    return {
        "lane.pml": hashlib.sha256(MODEL.read_bytes()).hexdigest(),
        "mistakes": {"size": " ".join(SIZE_OF_MISTAKES), "fail": MISTAKES},
    }


def write_record():
    states = check_model()
    check_mistakes()
    RECORD.write_text(json.dumps(described() | {"states": states}, indent=2) + "\n")


def check_unchanged():
    record = json.loads(RECORD.read_text())
    states = record.pop("states")
    assert record == described() and list(states) == [" ".join(size) for size in SIZES], (
        f"the model has changed since {RECORD.name} was written: run tests/protocol/model_test.py record")
    assert states_of(SIZES[0]) == states[" ".join(SIZES[0])]


if __name__ == "__main__":
    {
        "quotes": check_quotes,
        "model": check_model,
        "mistakes": check_mistakes,
        "unchanged": check_unchanged,
        "record": write_record,
    }[sys.argv[1]]()
