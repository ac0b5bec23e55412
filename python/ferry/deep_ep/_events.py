"""Events, and the choice of stream for each call."""

from __future__ import annotations

import contextlib

from ferry._core import EventHandle, _CallStreams


class EventOverlap:
    """An event to wait for, and tensors to keep alive until then. `with event:` waits at the end of the block."""

    __slots__ = ("event", "extra_tensors")

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


class Streams:
    """Chooses the stream of each call, and keeps the calls of a Buffer in order across streams."""

    def __init__(self):
        self.calls = _CallStreams()

    def comm(self):
        """The private high-priority stream of asynchronous calls; None without a GPU."""
        return self.calls.private_stream()

    def follow(self, arrays):
        """Puts a call on the current stream behind the Buffer's earlier calls: one without an event to wait for or to return."""
        if arrays.on_device:
            self.calls.begin(arrays.torch.cuda.current_device(), None, False)

    @contextlib.contextmanager
    def call(self, arrays, inputs, previous_event, async_finish):
        """Context of one call: the call's operations run on the stream chosen for it.

        Yields an object whose `outputs` the caller fills; its `event` is set when the context ends. `inputs` are the
        call's tensors. Memory that the call allocates belongs to the call's stream.
        """
        call = _Call()
        if not arrays.on_device:
            yield call
            call.event = EventOverlap(EventHandle() if async_finish else None)
            return
        torch = arrays.torch
        current = torch.cuda.current_stream()
        # The call itself refuses a wrong type.
        before = previous_event.event if isinstance(previous_event, EventOverlap) else None
        self.calls.begin(current.device_index, before, async_finish)
        if before is None and not async_finish:  # on the current stream; call.event stays empty
            yield call
            return
        stream = self.comm()
        with torch.cuda.stream(stream):
            yield call
            done = EventHandle()
        # Keep the allocator from reusing tensors before the other stream has finished with them.
        for tensor in inputs:
            tensor.record_stream(stream)
        for tensor in call.outputs:
            tensor.record_stream(current)
        if async_finish:
            call.event = EventOverlap(done)
        else:
            done.current_stream_wait()


class _Call:
    def __init__(self):
        self.outputs = []
        self.event = EventOverlap()
