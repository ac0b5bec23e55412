"""deep_ep.utils: events."""

from ferry.deep_ep.utils import event
from ferry.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "event"]
