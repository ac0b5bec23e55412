"""usage: model_test.py quotes|model|mistakes

Checks lane.pml: that the code it quotes is there, that its assertions hold in every state and no state is a deadlock,
and that each seeded mistake makes an assertion fail that is about it.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

MODEL = pathlib.Path(__file__).with_name("lane.pml")
SOURCES = MODEL.parents[2] / "src/backends/cuda"

# Places of both generations are written again with two deviations that may meet, of one rank or two; arrivals, with one
# deviation before, between or after; and plans of two ranks are damaged at a time.
SIZES = [
    ["CALLS=5", "DEVIATIONS=2", "PLACING=0"],
    ["CALLS=4", "DEVIATIONS=0", "PLACING=3", "FEW=1"],
    ["CALLS=3", "DEVIATIONS=1", "PLACING=2"],
    ["CALLS=2", "DEVIATIONS=0", "PLACING=1", "DAMAGED=2", "FEW=1"],
]
SIZE_OF_MISTAKES = ["CALLS=5", "DEVIATIONS=1", "PLACING=2"]

# What the assertion that fails first looks at; or that nobody goes on.
DEADLOCK = "invalid end state"
MISTAKES = {
    "FLAG_WITHOUT_RELEASE": "row",
    "NUMBER_AND_WORD_APART": "letter",
    "LAST_WORD_WITHOUT_FENCE": "row_flag",
    "ONE_GENERATION_OF_LETTERS": "letter",
    "ONE_GENERATION_OF_ROWS": "row",
    "EARLY_END_WITHOUT_ALL_LETTERS": "letter",
    "REFUSAL_WITHOUT_ALL_LETTERS": "letter",
    "LAST_WORD_OF_THE_FIRST_BLOCK": "row_flag",
    "LAST_WORD_AFTER_ROWS": DEADLOCK,
    "PLACED_BEFORE_LETTERS": "arrival",
    "PLACED_WHERE_NOT_LET": "row",
    "PLACED_ROW_WITHOUT_FLAG": "arrival",
    "LETTER_BEFORE_ARRIVALS_ARE_READ": "arrival",
}


def explore(defines, optimisation):
    """What Spin's verifier prints about all states of the model, up to the first error."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*command):
            return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout

        run("spin", *(f"-D{define}" for define in defines), "-a", str(MODEL))
        run("gcc", "-w", optimisation, "-DSAFETY", "-DMEMLIM=4000", "-o", "pan", "pan.c")
        return run("./pan", "-m10000", "-n", "-w25")  # slots enough for the states of each size


def bodies(text, function):
    """The bodies of all functions of that name."""
    for definition in re.finditer(rf"\b{function}\((?:[^;{{}}]|\{{\}})*\{{\n", text):
        depth, end = 1, definition.end()
        while depth > 0:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield " ".join(text[definition.end() : end].split())


def check_quotes():
    model = MODEL.read_text()
    quotes = re.findall(r"([\w.]+\.cuh?) (\w+): `([^`]+)`", model)
    assert 2 * len(quotes) == model.count("`") > 0, "a quote does not have the form: file function: `code`"
    for file, function, quote in quotes:
        found = list(bodies(next(SOURCES.rglob(file)).read_text(), function))
        assert found, f"{file} has no function {function}"
        assert any(quote in body for body in found), f"{file} {function} does not have: {quote}"
    print(len(quotes), "quotes found")


def check_model():
    for size in SIZES:
        report = explore(size, "-O2")
        print(*size, *re.findall(r"[\d.e+]+ states, stored|[\d.]+\ttotal actual memory usage", report), sep=", ")
        complete = "Search not completed" not in report and "max search depth" not in report
        assert complete and "errors: 0" in report, report


def check_mistakes():
    model = MODEL.read_text()
    assert set(re.findall(r"MISTAKE_([A-Z_]+)", model)) == set(MISTAKES), "the mistakes of the model are not those here"
    for mistake, looked_at in MISTAKES.items():
        size = SIZES[-1] if looked_at == DEADLOCK else SIZE_OF_MISTAKES
        report = explore([*size, f"MISTAKE_{mistake}"], "-O1")  # most searches end sooner than gcc
        failure = re.search(r"pan:1: (?:assertion violated \(+)?(\w[\w ]*\w).*", report)
        assert failure and failure[1] == looked_at, f"{mistake} was not caught:\n{report}"
        print(mistake, "is caught:", failure[0])


if __name__ == "__main__":
    {"quotes": check_quotes, "model": check_model, "mistakes": check_mistakes}[sys.argv[1]]()
