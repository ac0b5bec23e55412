"""Group.processes: ranks are forks of the interpreter; what they return and raise comes back."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import ferry

HIDDEN = 16


def dispatch_once(rank, ids):
    with ferry.Exchange(rank, experts=8, top_k=2, hidden=HIDDEN, max_tokens=4, deadline=10, format="fp32") as exchange:
        rows = exchange.dispatch(np.full((2, HIDDEN), 1 + rank.index, np.float32), np.array(ids, np.int32))
        result = exchange.combine(rows.received_rows() if rows.wait_total() else rows.data, rows.plan)
        return int(rows.total), result[0, 0]


@pytest.mark.parametrize("nodes", [1, 2])
def test_results_come_back(nodes):
    parent, seen = os.getpid(), []

    def body(rank):
        seen.append(rank.index)
        return os.getpid() != parent, dispatch_once(rank, [[0, 7], [1, 6]])

    group = ferry.Group.processes(4, nodes)
    for _ in range(2):
        assert group.run(body) == [(True, (8, 2)), (True, (0, 4)), (True, (0, 6)), (True, (8, 8))]
    assert seen == []


def raise_on_rank_2(rank):
    if rank.index == 2:
        raise KeyError("mine")
    rank.barrier()


def kill_rank_2(rank):
    if rank.index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.barrier()


@pytest.mark.parametrize(
    ("body", "error", "pattern"),
    [
        (raise_on_rank_2, KeyError, "mine"),
        (lambda rank: dispatch_once(rank, [[0, 8], [1, 6]]), ferry.BadIdError, "id 8"),
        (kill_rank_2, ferry.PeerLostError, r"rank 2 \(process \d+\) was killed by signal 9"),
        (lambda rank: lambda: 3, (AttributeError, TypeError), "pickle"),
        (lambda rank: sys.exit(3), SystemExit, "3"),
        (lambda rank: os._exit(3), ferry.PeerLostError, "exited with status 3 instead of returning"),
    ],
)
def test_what_a_rank_raises_comes_back(body, error, pattern):
    with pytest.raises(error, match=pattern) as caught:
        ferry.Group.processes(3).run(body)
    if body is raise_on_rank_2 and hasattr(caught.value, "add_note"):
        note, = caught.value.__notes__
        assert note.startswith("raised by rank 2:\nTraceback (most recent call last):\n")
        assert "in raise_on_rank_2\n" in note and note.endswith("\nKeyError: 'mine'")
    assert ferry.Group.processes(2).run(lambda rank: rank.index) == [0, 1]


class TwoArguments(Exception):
    def __init__(self, name, number):
        super().__init__(f"{name} has {number}")


@pytest.mark.parametrize("local", [False, True])
def test_an_exception_that_pickle_cannot_send_comes_back_as_text(local):
    class Local(Exception):
        pass

    def body(rank):
        if rank.index == 1:
            raise Local("mine") if local else TwoArguments("mine", 7)
        rank.barrier()

    pattern = r"Local: mine \(pickle" if local else r"TwoArguments: mine has 7 \(pickle cannot send this exception: .*'number'\)"
    with pytest.raises(RuntimeError, match=pattern) as caught:
        ferry.Group.processes(3).run(body)
    if hasattr(caught.value, "add_note"):
        assert caught.value.__notes__[0].startswith("raised by rank 1:\nTraceback")


def test_an_interrupt_ends_the_processes():
    parent, begin = os.getpid(), time.monotonic()

    def body(rank):
        # Python drops an interrupt that comes while it forks.
        rank.barrier()
        time.sleep(0.2)
        if rank.index == 0:
            os.kill(parent, signal.SIGINT)
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        ferry.Group.processes(2).run(body)
    assert time.monotonic() - begin < 10


def test_a_group_of_processes_cannot_be_joined():
    with pytest.raises(ferry.UsageError, match=r"no rank outside run\(\)"):
        ferry.Group.processes(2).join()


def test_buffered_output_is_written_once():
    code = """
import sys, ferry
sys.stdout.write("parent\\n")
ferry.Group.processes(2).run(lambda rank: sys.stdout.write(f"rank {rank.index}\\n"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert sorted(done.stdout.splitlines()) == ["parent", "rank 0", "rank 1"]


def test_the_log_names_exchanges_and_failures():
    code = """
import os, ferry
def body(rank):
    ferry.Exchange(rank, experts=8, top_k=2, hidden=16, max_tokens=4, backend="cpu").destroy()
    rank.barrier()
    if rank.index == 1:
        os._exit(3)
    rank.barrier()
ferry.Group.processes(2).run(body)
"""
    environment = os.environ | {"FERRY_LOG": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ferry: ")]
    made = "has made an exchange: backend cpu, experts 8, top_k 2, hidden 16, max_tokens 4, expert_major, capacity 16, bf16, lanes 1, "
    assert sum(made in line for line in lines) == 2, done.stderr
    assert sum("the group has failed: " in line for line in lines) == 1, done.stderr


@pytest.mark.parametrize("end", ["return", "exception"])
@pytest.mark.parametrize("start", ["processes", "threads"])
def test_a_process_forked_in_the_body_does_not_speak_for_the_rank(start, end):
    code = f"""
import os
import ferry
def body(rank):
    exchange = ferry.Exchange(rank, experts=3, top_k=1, hidden=8, max_tokens=1)
    copy = os.fork() if rank.index == 1 else None
    if copy == 0:
        if "{end}" == "exception":
            raise ValueError("of the copy")
        return "of the copy"
    if copy is not None:
        assert os.WIFEXITED(os.waitpid(copy, 0)[1])
    rank.barrier()
    return rank.index, exchange.metadata(rank.index).tolist()
assert ferry.Group.{start}(3).run(body) == [(0, [3, 0, 2]), (1, [3, 0, 2]), (2, [3, 1, 2])]
"""
    # In a process of its own: a library that others have loaded here may not survive a fork beside threads.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
