"""Events, and on which stream a call works."""

from __future__ import annotations

import contextlib


class EventHandle:
    """An event recorded on the current stream. Without PyTorch or a GPU all work is done when a call returns."""

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
    """An event to wait for, and the tensors that live until then. `with event:` waits on leaving the block."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """The current stream goes on after the event."""
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
    """Chooses the stream of every call, and keeps the calls of an exchange in order."""

    def __init__(self):
        self._comm = None
        self._last = None

    def comm(self):
        """The private stream, of high priority; None without a GPU."""
        torch = _torch_with_gpu()
        if self._comm is None and torch is not None:
            self._comm = torch.cuda.Stream(priority=-1)
        return self._comm

    @contextlib.contextmanager
    def call(self, arrays, inputs, previous_event, async_finish):
        """Runs a call's operations over `inputs`; yields an object whose `outputs` the caller fills, and which has the
        `event` afterwards. What a call allocates is of the stream it runs on."""
        if not arrays.on_device:
            yield (call := _Call())
            call.event = EventOverlap(EventHandle() if async_finish else None)
            return
        torch = arrays.torch
        current = torch.cuda.current_stream()
        # Where nothing is asked for, the current stream is as good as a private one between two waits. The event of a
        # call that was not asynchronous holds none.
        before = getattr(previous_event, "event", None)  # what is no event the call refuses
        private = async_finish or before is not None
        stream = self.comm() if private else current
        if before is not None:
            stream.wait_event(before.event)
        elif private:
            stream.wait_stream(current)
        self._follow(torch, stream)
        call = _Call()
        if not private:  # the event is none: nothing is asynchronous
            yield call
            return
        with torch.cuda.stream(stream):
            yield call
            call.event = EventOverlap(EventHandle() if async_finish else None)
        # Their memory is not given to others before the other stream has done with it.
        for tensor in inputs:
            tensor.record_stream(stream)
        for tensor in call.outputs:
            tensor.record_stream(current)
        if not async_finish:
            current.wait_stream(stream)

    def _follow(self, torch, stream):
        # Calls of a lane come one after the other, whatever the streams. A graph that is being captured holds calls
        # of one stream, and what ran before it has ended when it is replayed.
        if self._last is not None and self._last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._last)
        self._last = stream


class _Call:
    def __init__(self):
        self.outputs = []
        self.event = EventOverlap()
