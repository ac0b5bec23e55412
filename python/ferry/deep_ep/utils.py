"""deep_ep.utils: events."""

from __future__ import annotations

from ferry._core import EventHandle

__all__ = ["EventHandle", "EventOverlap"]


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
