"""Array operations in which NumPy and PyTorch differ. All other code of this package serves both."""

from __future__ import annotations

import contextlib
import functools


class NumpyArrays:
    """NumPy arrays, with the types of ml_dtypes. Types are given by name, such as "bfloat16"."""

    on_device = False

    def __init__(self):
        import ml_dtypes
        import numpy

        self.numpy = numpy
        self.types = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bool": numpy.bool_}

    def type(self, name):
        return self.types.get(name) or getattr(self.numpy, name)

    def type_name(self, array):
        return array.dtype.name

    def empty(self, shape, name, like=None):
        return self.numpy.empty(shape, self.type(name))

    def full(self, shape, value, name, like=None):
        return self.numpy.full(shape, value, self.type(name))

    def arange(self, count, name, like=None):
        return self.numpy.arange(count, dtype=self.type(name))

    def from_list(self, values, name, like=None):
        return self.numpy.array(values, self.type(name))

    def to(self, array, name):
        return array.astype(self.type(name), copy=False)

    def copy(self, array):
        return array.copy()

    def detached(self, array):
        return array

    def contiguous(self, array):
        return self.numpy.ascontiguousarray(array)

    def sorted_rows(self, array):
        return self.numpy.sort(array, 1)

    def stack(self, arrays, axis):
        return self.numpy.stack(arrays, axis)

    def concatenate(self, arrays):
        return self.numpy.concatenate(arrays)

    def bytes_of(self, array):
        """uint8 [rows, bytes]: the bytes of each row of a matrix."""
        return self.contiguous(array).view(self.numpy.uint8)

    def where(self, condition, array, value):
        return self.numpy.where(condition, array, array.dtype.type(value))

    def count(self, values, length):
        """int32 [length]: how often each of 0 to length - 1 occurs in `values`; negative values are not counted."""
        values = values.ravel()
        return self.count_nonnegative(values[values >= 0], length)

    def count_nonnegative(self, values, length):
        """As count(), for int64 values of which none is negative."""
        return self.numpy.bincount(values.ravel(), minlength=length).astype(self.numpy.int32)

    def on_host(self, array):
        return array

    def quietly(self):
        """Within it arithmetic of NaN and of values out of range gives no warnings."""
        return self.numpy.errstate(all="ignore")


class TorchArrays:
    """PyTorch tensors, on the device of the tensor `like`. Only from_list and on_host wait for the device."""

    def __init__(self, on_device):
        import torch

        self.torch = torch
        self.on_device = on_device

    def type(self, name):
        return getattr(self.torch, name)

    def type_name(self, array):
        return str(array.dtype).removeprefix("torch.")

    def empty(self, shape, name, like):
        return self.torch.empty(shape, dtype=self.type(name), device=like.device)

    def full(self, shape, value, name, like):
        return self.torch.full(tuple(shape), value, dtype=self.type(name), device=like.device)

    def arange(self, count, name, like):
        return self.torch.arange(count, dtype=self.type(name), device=like.device)

    def from_list(self, values, name, like):
        return self.torch.tensor(values, dtype=self.type(name), device=like.device)

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
        return self.torch.sort(array, 1).values

    def stack(self, arrays, axis):
        return self.torch.stack(arrays, axis)

    def concatenate(self, arrays):
        return self.torch.cat(arrays)

    def bytes_of(self, array):
        return self.contiguous(array).view(self.torch.uint8)

    def where(self, condition, array, value):
        return self.torch.where(condition, array, value)

    def count(self, values, length):
        values = values.to(self.torch.int64)
        return self.count_nonnegative(self.torch.where(values >= 0, values, length), length + 1)[:length]

    def count_nonnegative(self, values, length):
        counts = self.torch.zeros(length, dtype=self.torch.int32, device=values.device)
        one = counts.new_ones(()).expand(values.numel())  # expand() makes the ones without writing values.numel() numbers
        return counts.scatter_add_(0, values.reshape(-1), one)

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
