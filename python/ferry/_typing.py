"""Types of arguments, for type checkers."""

from collections.abc import Callable
from typing import Any, Protocol


class Array(Protocol):
    """An array of NumPy, PyTorch or CuPy: whatever can be exchanged by DLPack."""

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...
