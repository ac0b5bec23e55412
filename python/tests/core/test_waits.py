"""wait_times(): a rank that comes late by a known time, and which peers waited for it. metrics(): as Prometheus reads it."""

import time

import ml_dtypes
import numpy as np
import pytest

import ferry

RANKS, SLOW, DELAY = 4, 2, 0.4  # seconds
SETTINGS = {"experts": 8, "top_k": 2, "hidden": 64, "max_tokens": 16, "count_waits": True}


def step(exchange, late_in):
    """A dispatch and a combine; before one of them the slow rank sleeps. Returns when this rank began that one, and what the two waited for
    each peer, in seconds."""
    begun = {}

    def together(operation):
        exchange.metadata(0)
        before = exchange.wait_times()
        if late_in == operation and exchange.rank == SLOW:
            time.sleep(DELAY)
        begun[operation] = time.monotonic()
        return getattr(before, operation)

    ids = np.stack([np.arange(16) % 8, np.arange(1, 17) % 8], 1).astype(np.int32)
    before = {"dispatch": together("dispatch")}
    rows = exchange.dispatch(np.ones((16, 64), ml_dtypes.bfloat16), ids)
    waited = {"dispatch": (exchange.wait_times().dispatch - before["dispatch"]) * 1e-9}
    before["combine"] = together("combine")
    exchange.combine(rows.received_rows().copy(), rows.plan)
    waited["combine"] = (exchange.wait_times().combine - before["combine"]) * 1e-9
    return begun[late_in], waited


# `cpu` in one hop, and an engine's calls, which two hops make.
@pytest.mark.parametrize("hops", ["one", "two"])
@pytest.mark.parametrize("late_in", ["dispatch", "combine"])
def test_a_late_rank_is_in_the_rows_of_its_peers(hops, late_in):
    results = [None] * RANKS

    def body(rank):
        results[rank.index] = step(ferry.Exchange(rank, **SETTINGS, hops=hops), late_in)

    ferry.Group.threads(ferry.Topology([0, 0, 1, 1]) if hops == "two" else RANKS).run(body)
    for rank in set(range(RANKS)) - {SLOW}:
        late, times = results[SLOW][0] - results[rank][0], results[rank][1]
        assert late > DELAY / 2, results
        if hops == "one":
            assert times[late_in][SLOW] == pytest.approx(late, abs=DELAY / 4), (rank, times)
        assert times[late_in].sum() == pytest.approx(late, abs=DELAY / 4), (rank, times)
        assert times[{"dispatch": "combine", "combine": "dispatch"}[late_in]].sum() < late / 2
    assert results[SLOW][1][late_in].sum() < DELAY / 2, results[SLOW]


def test_without_count_waits_nothing_is_counted():
    def body(rank):
        exchange = ferry.Exchange(rank, **{**SETTINGS, "count_waits": False})
        if rank.index == SLOW:
            time.sleep(0.05)
        exchange.metadata(0)
        times = exchange.wait_times()
        assert times.dispatch.tolist() == times.combine.tolist() == [0] * RANKS

    ferry.Group.threads(RANKS).run(body)


@pytest.mark.parametrize("settings", [{"backend": "cuda"}, {"backend": "nvshmem"}, {"backend": "collective", "memory": "device"}])
def test_device_memory_is_refused_by_name(settings):
    with pytest.raises(ferry.UnsupportedError, match=f"count_waits is for host memory, and the backend {settings['backend']}"):
        ferry.Config(**SETTINGS, **settings)


def samples_of(families):
    return {(sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples}


def test_prometheus_reads_the_metrics():
    parser = pytest.importorskip("prometheus_client.parser")

    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        step(exchange, "dispatch")
        name = 'quotes "\\" and\nlines'
        read = samples_of(parser.text_string_to_metric_families(ferry.metrics({name: exchange})))
        assert read == samples_of(ferry.MetricsCollector({name: exchange}).collect())
        assert read["ferry_dispatches_total", ("exchange", name), ("rank", str(rank.index))] == 1

    ferry.Group.threads(RANKS).run(body)


def test_metrics_are_the_counts():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        step(exchange, "dispatch")
        lines = ferry.metrics({"decode": exchange}).splitlines()
        here, bytes_sent = f'exchange="decode",rank="{rank.index}"', exchange.wire_counts().combine_bytes
        assert f"ferry_dispatches_total{{{here}}} 1" in lines
        assert f"ferry_routes_total{{{here}}} {exchange.load_counts().ranks[rank.index]}" in lines
        assert f'ferry_sent_bytes_total{{{here},operation="combine"}} {bytes_sent}' in lines
        for peer, waited in enumerate(exchange.wait_times().dispatch.tolist()):
            assert f'ferry_wait_seconds_total{{{here},operation="dispatch",peer="{peer}"}} {waited * 1e-9}' in lines

    ferry.Group.threads(RANKS).run(body)
    assert ferry.metrics({}).count("# TYPE") == 5
