"""The type stub, which the build makes, is right."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

import ferry

STUB = ast.parse(pathlib.Path(ferry.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))


def parameters_of(function):
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def test_every_setting_is_a_parameter():
    constructors = {c.name: [f for f in c.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
                    for c in STUB.body if isinstance(c, ast.ClassDef)}
    with pytest.raises(ferry.UsageError) as caught:
        ferry.Config(nonsense=1)
    settings = set(str(caught.value).split("the settings are: ")[1].split(", "))
    assert parameters_of(constructors["Config"][0]) == settings | {"self"}
    with_config, with_settings = constructors["Exchange"]
    assert parameters_of(with_config) == {"self", "group", "config", "device"}
    assert parameters_of(with_settings) == settings | {"self", "group", "device"}


def names_in_stub(function):
    """Positional parameters, keyword-only ones, and how many of the first have a default."""
    arguments = function.args
    plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    return plain, [a.arg for a in arguments.kwonlyargs], len(arguments.defaults)


def names_by_inspect(function):
    signature = inspect.signature(function)
    kinds = inspect.Parameter
    plain = [p for p in signature.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in signature.parameters.values() if p.kind is kinds.KEYWORD_ONLY]
    return [p.name for p in plain], keywords, sum(p.default is not p.empty for p in plain)


def test_inspect_reads_signatures():
    functions = 0
    for item in STUB.body:
        if isinstance(item, ast.FunctionDef):
            assert names_by_inspect(getattr(ferry._core, item.name)) == names_in_stub(item), item.name
        if isinstance(item, ast.ClassDef):
            owner = getattr(ferry._core, item.name)
            for method in item.body:
                if not isinstance(method, ast.FunctionDef) or method.name.startswith("__"):
                    continue
                if not {ast.unparse(decorator) for decorator in method.decorator_list} <= {"staticmethod"}:
                    continue  # a property
                found = names_by_inspect(getattr(owner, method.name))
                assert found == names_in_stub(method), f"{item.name}.{method.name}"
                functions += 1
    assert functions > 40

    dispatch = inspect.signature(ferry.Exchange.dispatch)
    assert dispatch.parameters["lane"].default == 0 and dispatch.return_annotation == "DispatchResult"
    assert list(inspect.signature(vars(ferry.Placement)["experts"].fget).parameters) == ["self"]
    location = ferry.Placement.blocks(4, 2).location
    assert list(inspect.signature(location).parameters) == ["expert"]  # bound: without self
    settings = inspect.signature(ferry.Config).parameters
    assert settings["layout"].default == "expert_major" and settings["experts"].default is inspect.Parameter.empty
    assert "placement: 'Placement' = ...," in str(inspect.signature(ferry.Config))
    assert list(inspect.signature(ferry.Exchange).parameters)[:3] == ["group", "config", "device"]

    class Own(ferry.Exchange):
        def __init__(self, only):
            pass

    assert list(inspect.signature(Own).parameters) == ["only"]


ANNOTATED = """
from typing import Any
import numpy
import ferry

def step(exchange: ferry.Exchange, x: Any, ids: Any, weights: Any) -> Any:
    rows = exchange.dispatch(x, ids, weights, lane=0)
    outputs = rows.received_rows() * 2
    plan: ferry.Plan = rows.plan.copy()
    return exchange.combine(outputs, plan, row_weights=rows.weight).sum()

def body(rank: ferry.Rank) -> int:
    with ferry.Exchange(rank, experts=8, top_k=2, hidden=16, max_tokens=4, deadline=5) as exchange:
        step(exchange, 1, 2, 3)
    ferry.Exchange(rank, ferry.Config(experts=8, top_k=2, hidden=16, max_tokens=4, layout="rank_major"))
    return rank.index

results: list[int] = ferry.Group.threads(2).run(body)

def with_numpy(exchange: ferry.Exchange, x: numpy.ndarray[Any, Any], ids: numpy.ndarray[Any, Any]) -> None:
    exchange.combine(exchange.dispatch(x, ids).received_rows(), exchange.dispatch([x], ids).plan, reduction="exact")
"""

MISTAKEN = """
import numpy
import ferry
def body(rank: ferry.Rank) -> None:
    ferry.Config(experts=8, top_k=2, hidden=16)  # wrong
    ferry.Exchange(rank, exprts=8, top_k=2, hidden=16, max_tokens=4)  # wrong
    exchange = ferry.Exchange(rank, experts=8, top_k=2, hidden=16, max_tokens=4)
    array = numpy.zeros((4, 2))
    exchange.combine(array, "plan")  # wrong
    exchange.dispatch(array)  # wrong
    exchange.dispatch(array, array, memory=3)  # wrong
    exchange.dispatch(1, array)  # wrong
    exchange.combine(array, exchange.dispatch(array, array).plan, reduction="sum")  # wrong
    ferry.Config(experts=8, top_k=2, hidden=16, max_tokens=4, layout="foo")  # wrong
"""


def test_a_type_checker_accepts_the_stub(tmp_path):
    pytest.importorskip("mypy")

    def wrong_lines(text):
        (tmp_path / "example.py").write_text(text)
        environment = os.environ | {"MYPYPATH": str(pathlib.Path(ferry.__file__).parents[1])}
        # As for an installed package, whose own files a type checker reads and does not judge.
        command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent", "example.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        lines = re.findall(r"^example.py:(\d+): error", done.stdout, re.MULTILINE)
        assert done.returncode == (1 if lines else 0), done.stdout
        return sorted({int(line) for line in lines})

    assert wrong_lines(ANNOTATED) == []
    assert wrong_lines(MISTAKEN) == [n for n, line in enumerate(MISTAKEN.splitlines(), 1) if "# wrong" in line]


def test_everything_public_is_documented():
    for name in ferry.__all__:
        item = getattr(ferry, name)
        if isinstance(item, type):
            assert item.__doc__, name
            for attribute, value in vars(item).items():
                if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert value.__doc__, f"{name}.{attribute}"
        elif callable(item):
            assert item.__doc__, name
