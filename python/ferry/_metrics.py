"""Counters of exchanges for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import ferry


class _Counter(NamedTuple):
    name: str  # without the exposition's suffix _total
    help: str
    samples: list[tuple[dict[str, str], float]]


def _counters(exchanges: Mapping[str, ferry.Exchange]) -> list[_Counter]:
    dispatches = _Counter("ferry_dispatches", "Dispatches from ids.", [])
    routes = _Counter("ferry_routes", "Routes of dispatches from ids to this rank's experts.", [])
    sent_bytes = _Counter("ferry_sent_bytes", "Bytes sent to other ranks.", [])
    messages = _Counter("ferry_sent_messages", "Messages sent to other ranks.", [])
    waits = _Counter("ferry_wait_seconds", "Time waited for a peer; 0 without count_waits.", [])
    for name, exchange in exchanges.items():
        labels = {"exchange": name, "rank": str(exchange.rank)}
        load, wire, times = exchange.load_counts(), exchange.wire_counts(), exchange.wait_times()
        dispatches.samples.append((labels, load.dispatches))
        routes.samples.append((labels, int(load.ranks[exchange.rank])))
        for operation in ("dispatch", "combine"):
            of_operation = {**labels, "operation": operation}
            sent_bytes.samples.append((of_operation, getattr(wire, f"{operation}_bytes")))
            messages.samples.append((of_operation, getattr(wire, f"{operation}_messages")))
            for peer, nanoseconds in enumerate(getattr(times, operation).tolist()):
                waits.samples.append(({**of_operation, "peer": str(peer)}, nanoseconds * 1e-9))
    return [dispatches, routes, sent_bytes, messages, waits]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def metrics(exchanges: Mapping[str, ferry.Exchange]) -> str:
    """The counters of this rank's exchanges in Prometheus' text format. The keys become the label `exchange`.

    Local; any thread may call it while calls run."""
    lines = []
    for counter in _counters(exchanges):
        lines += [f"# HELP {counter.name}_total {counter.help}", f"# TYPE {counter.name}_total counter"]
        for labels, value in counter.samples:
            text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            lines.append(f"{counter.name}_total{{{text}}} {value}")
    return "\n".join(lines) + "\n"


class MetricsCollector:
    """A collector for prometheus_client: REGISTRY.register(MetricsCollector({"layers": exchange}))."""

    def __init__(self, exchanges: Mapping[str, ferry.Exchange]) -> None:
        self._exchanges = exchanges

    def collect(self) -> Iterator[Any]:
        """The counters now, as prometheus_client's metric families."""
        from prometheus_client.core import CounterMetricFamily

        for counter in _counters(self._exchanges):
            family = CounterMetricFamily(counter.name, counter.help, labels=list(counter.samples[0][0]) if counter.samples else [])
            for labels, value in counter.samples:
                family.add_metric(list(labels.values()), value)
            yield family
