"""The streams of a program's steps on GPUs."""

from __future__ import annotations

import contextlib
import sys

_NOTHING = contextlib.nullcontext()


class Streams:
    """Runs steps on streams of PyTorch: stream 0 is the current one of the caller, the others belong to the evaluator.

    A run forks them from stream 0 and joins them with it, so that it can be captured in a CUDA graph. In between a stream waits
    only for values that steps of other streams make. Without tensors on a GPU it does nothing.
    """

    def __init__(self, steps):
        self._numbers = sorted({step.stream for step in steps} - {0})
        self._made_on = {name: step.stream for step in steps for name in step.outputs}
        self._crossing = {name for step in steps for name in (*step.inputs, *step.after)
                          if self._made_on.get(name, step.stream) != step.stream}
        self._own = None  # number: stream
        self._streams = None  # the same during a run, with stream 0

    def begin(self, inputs):
        tensor = next((value for value in inputs if getattr(value, "is_cuda", False)), None)
        if tensor is None or not self._numbers:
            return
        self._cuda = sys.modules[type(tensor).__module__.partition(".")[0]].cuda
        if self._own is None:
            self._own = {number: self._cuda.Stream(tensor.device) for number in self._numbers}
        self._streams = {0: self._cuda.current_stream(tensor.device), **self._own}
        self._capturing = self._cuda.is_current_stream_capturing()
        self._events = {}
        for stream in self._own.values():
            stream.wait_stream(self._streams[0])

    def of(self, step, values):
        """Inside, the step's stream is the current one, and the values that the step takes are there."""
        return _NOTHING if self._streams is None else self._on_stream(step, values)

    @contextlib.contextmanager
    def _on_stream(self, step, values):
        stream = self._streams[step.stream]
        for name in dict.fromkeys((*step.inputs, *step.after)):
            if name in self._events and self._made_on[name] != step.stream:
                stream.wait_event(self._events[name])
                if name in step.inputs:
                    self._keep(values.get(name), stream)
        with self._cuda.stream(stream):
            yield
        for name in step.outputs:
            if name in self._crossing:
                self._events[name] = stream.record_event()

    def end(self, outputs):
        """Stream 0 waits for the others. `outputs`: names and values that live on."""
        if self._streams is None:
            return
        for stream in self._own.values():
            self._streams[0].wait_stream(stream)
        for name, value in outputs:
            if self._made_on.get(name, 0) != 0:
                self._keep(value, self._streams[0])
        self._streams = None

    def _keep(self, value, stream):
        # The memory of a tensor is reused when its own stream is done with it, unless the other stream is recorded. In a graph
        # it belongs to the graph.
        if hasattr(value, "record_stream") and not self._capturing:
            value.record_stream(stream)
