"""usage: model_test.py quotes|model|mistakes|unchanged|record

Checks the models, lane.pml and windows.pml: the code contains their quotes; their assertions hold in every state and no state is a
deadlock; each seeded mistake makes an assertion fail that is about it, or deadlocks.

`model` and `mistakes` take minutes, and nothing but the models and the lists below changes their outcome. So `record` runs
both and writes what they found to explored.json. `unchanged` fails if a model or its lists are not those of the record; it
explores each model's smallest size again and compares.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import typing

FOLDER = pathlib.Path(__file__).parent
RECORD = FOLDER / "explored.json"
SOURCES = FOLDER.parents[1] / "src/backends/cuda"
DEADLOCK = "invalid end state"


class Model(typing.NamedTuple):
    """A file, the sizes in which it is explored, and for each seeded mistake its size and the variable in the assertion that must
    fail first, or a deadlock."""

    file: str
    sizes: list[list[str]]
    mistakes: dict[str, tuple[list[str], str]]

    @property
    def path(self):
        return FOLDER / self.file


# Sizes of lane.pml. They cover: buffers of both parities written again, with two deviations at once, of one
# rank or two; direct writes with a deviation before, between or after; damaged plans of two ranks at once.
LANE_SIZES = [
    ["CALLS=5", "DEVIATIONS=2", "DIRECT_WRITES=0"],
    ["CALLS=4", "DEVIATIONS=0", "DIRECT_WRITES=3", "FEW=1"],
    ["CALLS=3", "DEVIATIONS=1", "DIRECT_WRITES=2"],
    ["CALLS=2", "DEVIATIONS=0", "DIRECT_WRITES=1", "DAMAGED=2", "FEW=1"],
]
LANE_MISTAKES = {
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

# Sizes of windows.pml. They cover: windows of one slot that are written again in a call and in the next one,
# with messages that are forwarded and with rows that are added.
WINDOWS_SIZES = [
    ["CALLS=1", "DIRECT=0", "MESSAGES=2"],
    ["CALLS=2", "DIRECT=0", "MESSAGES=2"],
    ["CALLS=2", "DIRECT=0", "MESSAGES=2", "SUMS=1"],
]
WINDOWS_MISTAKES = {
    "FLAG_WITHOUT_RELEASE": "whole",
    "FLAG_WITHOUT_CALL": "message",
    "CREDIT_WITHOUT_CALL": "unread",
    "END_WITHOUT_CREDITS": "late_credit",
    "END_WITHOUT_CALL": "in",
    "WRITE_BEFORE_HEADERS": "unread",
    "CREDIT_BEFORE_FORWARDING": "unread",
    "RELAY_AFTER_SENDING": DEADLOCK,
    "RECEIVE_AFTER_RELAYING": DEADLOCK,
    "SUM_WITHOUT_LATE_RANKS": "note",
}

MODELS = [
    Model("lane.pml", LANE_SIZES,
          {mistake: (LANE_SIZES[-1] if variable == DEADLOCK else ["CALLS=5", "DEVIATIONS=1", "DIRECT_WRITES=2"], variable)
           for mistake, variable in LANE_MISTAKES.items()}),
    Model("windows.pml", WINDOWS_SIZES,
          {mistake: (WINDOWS_SIZES[2 if mistake.startswith("SUM_") else 1], variable)
           for mistake, variable in WINDOWS_MISTAKES.items()}),
]


def explore(model, defines, optimisation):
    """Explores all states of a model, up to the first error; returns the output of Spin's verifier."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*command):
            return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout

        run("spin", *(f"-D{define}" for define in defines), "-a", str(model.path))
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
    quotes = []
    for model in MODELS:
        text = model.path.read_text()
        of_model = re.findall(r"([\w.]+\.cuh?) (\w+): `([^`]+)`", text)
        assert 2 * len(of_model) == text.count("`"), f"a quote of {model.file} is not of the form: file function: `code`"
        quotes += of_model
    assert quotes
    missing = []
    for file, function, quote in quotes:
        source = next(SOURCES.rglob(file), None)
        found = list(bodies(source.read_text(), function)) if source else []
        if not any(quote in body for body in found):
            missing.append(f"{file} {function} " + (f"does not contain: {quote}" if found else "does not exist"))
    assert not missing, "\n".join(["a model quotes code that is not there:", *missing])
    print(len(quotes), "quotes found")


def states_of(model, size):
    """Explores a size, whose assertions must hold in every state; returns the number of states."""
    report = explore(model, size, "-O2")
    complete = "Search not completed" not in report and "max search depth" not in report
    assert complete and "errors: 0" in report, report
    states = int(re.search(r"(\d+) states, stored", report)[1])
    print(model.file, *size, f"{states} states", sep=", ")
    return states


def check_model():
    return {model.file: {" ".join(size): states_of(model, size) for size in model.sizes} for model in MODELS}


def check_mistakes():
    for model in MODELS:
        listed = set(re.findall(r"MISTAKE_([A-Z_0-9]+)", model.path.read_text()))
        assert listed == set(model.mistakes), f"{model.file} and this script list different mistakes"
        for mistake, (size, variable) in model.mistakes.items():
            report = explore(model, [*size, f"MISTAKE_{mistake}"], "-O1")  # most searches take less time than the compiler
            failure = re.search(r"pan:1: (?:assertion violated \(*)?(\w[\w ]*\w).*", report)
            assert failure and failure[1] == variable, f"{mistake} was not caught:\n{report}"
            print(model.file, mistake, "is caught:", failure[0])


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def described():
    """What decides the outcome of `model` and `mistakes`: the models without their comments, and the lists."""
    return {
        model.file: {
            "sha256": hashlib.sha256(" ".join(without_comments(model.path.read_text()).split()).encode()).hexdigest(),
            "mistakes": {mistake: {"size": " ".join(size), "fails": variable}
                         for mistake, (size, variable) in model.mistakes.items()},
        }
        for model in MODELS
    }


def write_record():
    states = check_model()
    check_mistakes()
    record = {name: model | {"states": states[name]} for name, model in described().items()}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def check_unchanged():
    record = json.loads(RECORD.read_text())
    states = {name: model.pop("states") for name, model in record.items()}
    for model in MODELS:
        assert record == described() and list(states[model.file]) == [" ".join(size) for size in model.sizes], (
            f"a model has changed since {RECORD.name} was written: run tests/protocol/model_test.py record")
        assert states_of(model, model.sizes[0]) == states[model.file][" ".join(model.sizes[0])]


if __name__ == "__main__":
    {
        "quotes": check_quotes,
        "model": check_model,
        "mistakes": check_mistakes,
        "unchanged": check_unchanged,
        "record": write_record,
    }[sys.argv[1]]()
