"""Signatures of the compiled functions and classes for inspect.signature(), from the texts that nanobind keeps of them."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

_KINDS = inspect.Parameter


class _Unstated:
    """A default value that the signature does not name."""

    def __repr__(self) -> str:
        return "..."


def _default_of(node: ast.expr | None, values: tuple[Any, ...]) -> Any:
    if node is None:
        return _KINDS.empty
    if isinstance(node, ast.Subscript):  # a value that has no text: see _parsed()
        return values[ast.literal_eval(node.slice)]
    value = ast.literal_eval(node)
    return _Unstated() if value is ... else value


def _parsed(text: str, values: tuple[Any, ...]) -> inspect.Signature:
    """The signature of `def name(...) -> ...`, in which \\0, \\1, ... stand for default values."""
    text = re.sub(r"\\(\d+)", r"values[\1]", text)
    text = re.sub(r"^def \(", "def getter(", text)  # those of properties have no name
    function = ast.parse(f"{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)

    def parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        annotation = ast.unparse(argument.annotation) if argument.annotation else _KINDS.empty
        return inspect.Parameter(argument.arg, kind, default=_default_of(default, values), annotation=annotation)

    arguments = function.args
    positional = [(argument, _KINDS.POSITIONAL_ONLY) for argument in arguments.posonlyargs]
    positional += [(argument, _KINDS.POSITIONAL_OR_KEYWORD) for argument in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = [parameter(*pair, default) for pair, default in zip(positional, defaults)]
    if arguments.vararg:
        parameters.append(parameter(arguments.vararg, _KINDS.VAR_POSITIONAL))
    parameters += [parameter(argument, _KINDS.KEYWORD_ONLY, default)
                   for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        parameters.append(parameter(arguments.kwarg, _KINDS.VAR_KEYWORD))
    returns = ast.unparse(function.returns) if function.returns else inspect.Signature.empty
    return inspect.Signature(parameters, return_annotation=returns)


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _of_function(function: Any) -> inspect.Signature:
    overloads = function.__nb_signature__
    text, _, *values = overloads[0]
    return _parsed(text, values[0] if values and values[0] else ())


class _OfClass:
    """The attribute __signature__ of one class: its constructor's. Its instances and subclasses do not have it."""

    def __init__(self, owner: type) -> None:
        self.owner = owner

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None or owner is not self.owner:
            raise AttributeError("__signature__")
        return _without_self(_of_function(owner.__init__)).replace(return_annotation=inspect.Signature.empty)


function = property(_of_function)
bound_method = property(lambda method: _without_self(_of_function(method)))


def describe_classes(module: Any) -> None:
    for found in vars(module).values():
        if isinstance(found, type) and hasattr(found.__init__, "__nb_signature__") and "__signature__" not in vars(found):
            found.__signature__ = _OfClass(found)
