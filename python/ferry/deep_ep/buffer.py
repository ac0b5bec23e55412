"""deep_ep.buffer, for code that takes Buffer from there."""

from ferry.deep_ep._buffer import Buffer
from ferry.deep_ep._config import Config
from ferry.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
