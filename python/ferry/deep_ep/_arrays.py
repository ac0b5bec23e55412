"""Array operations in which NumPy and PyTorch differ. All other code of this package serves both."""

from __future__ import annotations

import contextlib
import functools


class _Arrays:
    """Operations by functions that NumPy and PyTorch name alike. Types are given by name, such as "bfloat16".

    New arrays are on the device of the array `like`.
    """

    def __init__(self, module, types=None):
        self.module = module
        self._types = types or {}

    def type(self, name):
        return self._types.get(name) or getattr(self.module, name)

    def _made_like(self, name, like):
        return {"dtype": self.type(name)}

    def empty(self, shape, name, like=None):
        return self.module.empty(shape, **self._made_like(name, like))

    def full(self, shape, value, name, like=None):
        return self.module.full(tuple(shape), value, **self._made_like(name, like))

    def arange(self, count, name, like=None):
        return self.module.arange(count, **self._made_like(name, like))

    def stack(self, arrays, axis):
        return self.module.stack(arrays, axis)

    def concatenate(self, arrays):
        return self.module.concatenate(arrays)

    def scattered(self, ids, values, columns):
        """[rows, columns]: zeros, but values[row, i] in column ids[row, i]. Negative ids are skipped."""
        wide = self.full((len(ids), columns + 1), 0, self.type_name(values), values)
        self._put(wide, self.to(self.where(ids >= 0, ids, columns), "int64"), values)
        return self.contiguous(wide[:, :columns])

    def gathered(self, ids, matrix):
        """[rows, K]: matrix[row, ids[row, i]], or 0 where the id is negative."""
        taken = self._take(matrix, self.to(self.where(ids >= 0, ids, 0), "int64"))
        return self.contiguous(self.where(ids >= 0, taken, 0))

    def bytes_of(self, array):
        """uint8 [rows, bytes]: the bytes of each row of a matrix."""
        return self.contiguous(array).view(self.module.uint8)


class NumpyArrays(_Arrays):
    """NumPy arrays, with the types of ml_dtypes."""

    on_device = False

    def __init__(self):
        import ml_dtypes
        import numpy

        super().__init__(numpy, {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bool": numpy.bool_})

    def type_name(self, array):
        return array.dtype.name

    def from_list(self, values, name, like=None):
        """An array of the numbers. PyTorch: on the host without `like`."""
        return self.module.array(values, self.type(name))

    def to(self, array, name):
        return array.astype(self.type(name), copy=False)

    def copy(self, array):
        return array.copy()

    def detached(self, array):
        return array

    def contiguous(self, array):
        return self.module.ascontiguousarray(array)

    def sorted_rows(self, array):
        return self.module.sort(array, 1)

    def _put(self, wide, columns, values):
        self.module.put_along_axis(wide, columns, values, 1)

    def _take(self, matrix, columns):
        return self.module.take_along_axis(matrix, columns, 1)

    def where(self, condition, array, value):
        return self.module.where(condition, array, array.dtype.type(value))

    def clear(self, array, rows):
        """Sets the rows of a matrix for which `rows`, bool, is true to zero."""
        array[rows] = 0

    def count(self, values, length):
        """int32 [length]: how often each of 0 to length - 1 occurs in `values`; negative values are not counted."""
        values = values.ravel()
        return self.module.bincount(values[values >= 0], minlength=length).astype(self.module.int32)

    def on_host(self, array):
        return array

    def quietly(self):
        """Within it arithmetic of NaN and of values out of range gives no warnings."""
        return self.module.errstate(all="ignore")


class TorchArrays(_Arrays):
    """PyTorch tensors. Only from_list and on_host wait for the device."""

    def __init__(self, on_device):
        import torch

        super().__init__(torch)
        self.torch = torch
        self.on_device = on_device

    def _made_like(self, name, like):
        return {"dtype": self.type(name), "device": like.device}

    def type_name(self, array):
        return str(array.dtype).removeprefix("torch.")

    def from_list(self, values, name, like=None):
        return self.module.tensor(values, dtype=self.type(name), device="cpu" if like is None else like.device)

    def to(self, array, name):
        return array.to(self.type(name))

    def copy(self, array):
        return array.clone()

    def detached(self, array):
        """Detached, because results carry no gradients: callers wrap calls in autograd functions of their own."""
        return array.detach() if array.requires_grad else array

    def contiguous(self, array):
        return self.detached(array).contiguous()

    def sorted_rows(self, array):
        return self.module.sort(array, 1).values

    def _put(self, wide, columns, values):
        wide.scatter_(1, columns, values)

    def _take(self, matrix, columns):
        return matrix.gather(1, columns)

    def where(self, condition, array, value):
        return self.module.where(condition, array, value)

    def clear(self, array, rows):
        self.bytes_of(array).masked_fill_(rows[:, None], 0)

    def count(self, values, length):
        values = values.to(self.module.int64)
        values = self.module.where(values >= 0, values, length)
        counts = self.module.zeros(length + 1, dtype=self.module.int32, device=values.device)
        one = counts.new_ones(()).expand(values.numel())  # expand() makes the ones without writing values.numel() numbers
        return counts.scatter_add_(0, values.reshape(-1), one)[:length]

    def on_host(self, array):
        return array.cpu()

    def quietly(self):
        return contextlib.nullcontext()


def rounded(arrays, array, name):
    """The computed values in another type, every NaN as docs/formats.md says, whatever the framework makes of payloads."""
    result = arrays.to(array, name)
    bits = result.view(arrays.type("int32" if name == "float32" else "int16"))
    return arrays.where(result == result, bits, 0x7FFFFFFF if name == "float32" else 0x7FFF).view(result.dtype)


@functools.cache
def _numpy():
    return NumpyArrays()


@functools.cache
def _torch(on_device):
    return TorchArrays(on_device)


def arrays_of(array):
    """The NumpyArrays or TorchArrays object for this array."""
    if type(array).__module__.startswith("torch"):
        return _torch(getattr(array, "is_cuda", False))  # require() refuses other objects of PyTorch
    return _numpy()
