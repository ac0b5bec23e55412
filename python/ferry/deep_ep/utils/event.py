"""Events, as calls take and return them."""

from __future__ import annotations

from ferry._core import EventHandle

__all__ = ["EventHandle", "EventOverlap"]


class EventOverlap:
    """An event to wait for, and tensors to keep alive until then. `with event:` waits at the end of the block."""

    __slots__ = ("_release", "event", "extra_tensors")

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, and with release_handle forgets it."""
        assert self.event is not None, "there is no event: the call was not asynchronous"
        self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`, which forgets the event at the end of the block."""
        self._release = release_handle
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False
