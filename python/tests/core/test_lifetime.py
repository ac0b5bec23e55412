"""Destruction, forks and threads never crash the interpreter."""

import gc
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ferry
from oracle import bf16

SETTINGS = {"experts": 4, "top_k": 2, "hidden": 16, "max_tokens": 4}
X = np.arange(48).reshape(3, 16).astype(bf16)
IDS = np.array([[0, 1], [2, 3], [-1, 1]], np.int32)


def test_arrays_outlive_their_exchange():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        rows = exchange.dispatch(X, IDS, np.ones((3, 2), np.float32))
        data, source, plan = rows.data, rows.source, rows.plan
        before = data.copy()
        exchange.destroy()
        del exchange, rows
        gc.collect()
        return np.array_equal(data, before) and plan.total == len([s for s in source.tolist() if s[0] >= 0]) or data, plan

    for data, plan in ferry.Group.threads(2).run(body):
        assert plan.total > 0


def test_use_after_destroy():
    def body(rank):
        with ferry.Exchange(rank, **SETTINGS) as exchange:
            plan = exchange.dispatch(X, IDS).plan
        for call in (
            lambda: exchange.dispatch(X, IDS),
            lambda: exchange.combine(X, plan),
            lambda: exchange.dispatch_send(X, IDS),
            lambda: exchange.dispatch_receive(),
            lambda: exchange.combine_receive(),
            lambda: exchange.metadata(1),
            lambda: exchange.check(),
            lambda: exchange.synchronize(),
            lambda: exchange.load_counts(),
            lambda: exchange.wire_counts(),
            lambda: exchange.last_dispatch_result(),
            lambda: exchange.plan_over(plan.storage),
            lambda: exchange.config,
            lambda: exchange.sizes,
        ):
            with pytest.raises(ferry.UsageError, match="used after destroy"):
                call()
        exchange.destroy()

    ferry.Group.threads(2).run(body)


def test_ranks_that_outlive_their_run():
    results = ferry.Group.threads(1).run(lambda rank: (rank, ferry.Exchange(rank, **SETTINGS)))
    rank, exchange = results[0]
    assert rank.index == 0
    exchange.dispatch(X, IDS)  # alone in its group: it waits for no peer
    rows = ferry.Group.threads(2).run(lambda rank: ferry.Exchange(rank, **SETTINGS))
    with pytest.raises(ferry.PeerLostError):
        rows[0].dispatch(X, IDS)


def test_use_in_a_forked_process_is_refused():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        rows = exchange.dispatch(X, IDS)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                messages = []
                for call in (lambda: exchange.dispatch(X, IDS), lambda: rank.barrier(), lambda: exchange.load_counts()):
                    try:
                        call()
                        messages.append("nothing")
                    except ferry.UsageError as error:
                        messages.append(str(error))
                exchange.destroy()
                os.write(writer, "\n".join(messages).encode())
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        messages = os.read(reader, 4096).decode().splitlines()
        assert len(messages) == 3 and all("forked from it" in line for line in messages), messages
        return rows.plan.total, exchange.dispatch(X, IDS).plan.total

    for before, after in ferry.Group.threads(1).run(body):
        assert before == after


def test_a_lane_serves_one_thread_at_a_time():
    entered = threading.Event()

    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS, lanes=2)
        if rank.index == 1:
            entered.wait(10)
            time.sleep(0.1)
            exchange.dispatch(X, IDS)
            exchange.dispatch(X, IDS, lane=1)
            return
        inside = threading.Thread(target=lambda: exchange.dispatch(X, IDS))
        inside.start()
        time.sleep(0.05)
        with pytest.raises(ferry.UsageError, match="in use by another thread"):
            exchange.dispatch(X, IDS)
        entered.set()
        exchange.dispatch(X, IDS, lane=1)
        inside.join()

    ferry.Group.threads(2).run(body)


def test_the_interpreter_runs_while_a_call_waits():
    counted = []

    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        if rank.index == 1:
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                counted.append(1)
            counted.append("then")
        exchange.dispatch(X, IDS)

    ferry.Group.threads(2).run(body)
    assert counted[-1] == "then" and len(counted) > 1000


def test_an_exception_of_a_rank_ends_the_others_waits():
    class Mine(Exception):
        pass

    lost = []

    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS)
        if rank.index == 1:
            raise Mine("of rank 1")
        try:
            exchange.dispatch(X, IDS)
        except ferry.PeerLostError as error:
            lost.append(error.record.peer)
            raise

    with pytest.raises(Mine, match="of rank 1") as raised:
        ferry.Group.threads(3).run(body)
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["raised by rank 1"]
    assert lost == [1, 1]


def test_a_peer_that_does_not_take_part():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS, deadline=0.2)
        if rank.index == 1:
            time.sleep(0.6)
            return None
        with pytest.raises(ferry.TimeoutError) as caught:
            exchange.dispatch(X, IDS)
        return caught.value.record

    record = ferry.Group.threads(2).run(body)[0]
    assert (record.operation, record.rank, record.peer, record.via) == ("dispatch", 0, 1, -1)
    assert (record.role, record.node) == ("none", -1)


def test_different_options_are_named():
    def body(rank):
        exchange = ferry.Exchange(rank, **SETTINGS, format="fp32")
        tokens = X.astype(np.float32)
        with pytest.raises(ferry.UsageError, match="format"):
            exchange.dispatch(tokens if rank.index else X, IDS, format="fp32" if rank.index else "bf16")

    ferry.Group.threads(2).run(body)


def test_memory_does_not_grow():
    def resident():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def body(rank):
        def calls(count):
            for call in range(count):
                if call % 50 == 0:
                    ferry.Exchange(rank, **SETTINGS).destroy()
                rows = exchange.dispatch(X, IDS)
                exchange.combine(rows.data, rows.plan)
                rows.plan.copy()
                with pytest.raises(ferry.UsageError):
                    exchange.dispatch(X, IDS[:1])

        exchange = ferry.Exchange(rank, **SETTINGS)
        calls(500)
        before = resident()
        calls(3000)
        return resident() - before

    assert max(ferry.Group.threads(2).run(body)) < 4096  # KiB


def test_a_program_may_end_as_soon_as_its_ranks_have():
    program = "import ferry; ferry.Group.threads(1).run(lambda rank: None)"
    programs = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(24)]  # at once, so that threads are delayed
    assert [running.wait(60) for running in programs] == [0] * 24
