"""deep_ep.utils, for code that takes the events from there."""

from ferry.deep_ep._events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
