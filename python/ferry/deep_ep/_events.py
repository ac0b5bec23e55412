"""Events, and the choice of stream for each call."""

from __future__ import annotations

import contextlib


class EventHandle:
    """An event recorded on the current stream. Without PyTorch or a GPU calls are synchronous, and it is empty."""

    def __init__(self):
        torch = _torch_with_gpu()
        self.event = None
        if torch is not None:
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        if self.event is not None:
            _torch_with_gpu().cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event to wait for, and tensors to keep alive until then. `with event:` waits at the end of the block."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event."""
        assert self.event is not None, "there is no event: the call was not asynchronous"
        self.event.current_stream_wait()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.event is not None:
            self.event.current_stream_wait()


def _torch_with_gpu():
    import sys

    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


class Streams:
    """Chooses the stream of each call, and keeps calls of one exchange in order across streams."""

    def __init__(self):
        self._comm = None
        self._last = None

    def comm(self):
        """The private high-priority stream of asynchronous calls; None without a GPU."""
        torch = _torch_with_gpu()
        if self._comm is None and torch is not None:
            self._comm = torch.cuda.Stream(priority=-1)
        return self._comm

    @contextlib.contextmanager
    def call(self, arrays, inputs, previous_event, async_finish):
        """Context of one call: the call's operations run on the stream chosen for it.

        Yields an object whose `outputs` the caller fills; its `event` is set when the context ends. `inputs` are the
        call's tensors. Memory that the call allocates belongs to the call's stream.
        """
        if not arrays.on_device:
            yield (call := _Call())
            call.event = EventOverlap(EventHandle() if async_finish else None)
            return
        torch = arrays.torch
        current = torch.cuda.current_stream()
        # A synchronous call without previous_event runs on the current stream: on the private one it would only add two
        # waits. The EventOverlap of a synchronous call holds no event.
        before = getattr(previous_event, "event", None)  # the call itself refuses a wrong type
        private = async_finish or before is not None
        stream = self.comm() if private else current
        if before is not None:
            stream.wait_event(before.event)
        elif private:
            stream.wait_stream(current)
        self._follow(torch, stream)
        call = _Call()
        if not private:  # call.event stays empty
            yield call
            return
        with torch.cuda.stream(stream):
            yield call
            call.event = EventOverlap(EventHandle() if async_finish else None)
        # Keep the allocator from reusing tensors before the other stream has finished with them.
        for tensor in inputs:
            tensor.record_stream(stream)
        for tensor in call.outputs:
            tensor.record_stream(current)
        if not async_finish:
            current.wait_stream(stream)

    def _follow(self, torch, stream):
        # Calls of a lane must run in order, whatever their streams. While a graph is captured no wait is needed: its calls
        # are on one stream, and earlier work has finished when it is replayed.
        if self._last is not None and self._last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._last)
        self._last = stream


class _Call:
    def __init__(self):
        self.outputs = []
        self.event = EventOverlap()
