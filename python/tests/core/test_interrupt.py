"""Signals while a rank waits: Ctrl-C ends the wait and raises KeyboardInterrupt."""

import signal
import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time
import numpy as np, ferry
SETTINGS = dict(experts=2, top_k=1, hidden=8, max_tokens=2, format="fp32")
X, IDS = np.ones((1, 8), np.float32), np.zeros((1, 1), np.int32)
def signal_after(seconds, number=signal.SIGINT):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), number)).start()
def report(call, prefix=""):
    start = time.monotonic()
    try:
        call()
        line = "nothing"
    except BaseException as error:
        line = f"{type(error).__name__} {'early' if time.monotonic() - start < 15 else 'late'} {error}"
    # One write for a line, because processes share the pipe.
    os.write(1, f"{prefix}{line}\\n".encode())
"""


def run_program(body):
    done = subprocess.run([sys.executable, "-c", START + body], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ctrl_c_ends_waits_of_threads():
    assert run_program("""
def body(rank):
    exchange = ferry.Exchange(rank, **SETTINGS, deadline=30)
    if rank.index == 1:
        time.sleep(2)
    try:
        exchange.dispatch(X, IDS)
        exchange.metadata(1) if rank.index == 0 else time.sleep(4)
    except Exception as error:
        errors.append(type(error).__name__)
        raise
errors = []
signal_after(3)
report(lambda: ferry.Group.threads(2).run(body))
os.write(1, f"{errors}\\n".encode())
report(lambda: ferry.Group.threads(2).run(lambda rank: ferry.Exchange(rank, **SETTINGS).dispatch(X, IDS).call))
""") == ["KeyboardInterrupt early ", "['PeerLostError']", "nothing"]


def test_a_second_ctrl_c_ends_python_code():
    assert run_program("""
def body(rank):
    try:
        while True:
            time.sleep(0.01)
    except BaseException as error:
        errors.append(type(error).__name__)
        raise
errors = []
signal_after(1)
signal_after(2)
report(lambda: ferry.Group.threads(2).run(body))
os.write(1, f"{errors}\\n".encode())
""") == ["KeyboardInterrupt early ", "['KeyboardInterrupt', 'KeyboardInterrupt']"]


def test_a_second_ctrl_c_leaves_blocked_threads_behind():
    assert run_program("""
signal_after(1)
signal_after(2)
report(lambda: ferry.Group.threads(2).run(lambda rank: time.sleep(50)))
report(lambda: ferry.Group.threads(2).run(lambda rank: rank.barrier()))
""") == ["KeyboardInterrupt early ", "nothing"]


def test_ctrl_c_in_a_process_and_its_peer():
    lines = run_program("""
import multiprocessing
def make_group(rank, pipe):
    def all_gather(mine):
        pipe.send_bytes(mine)
        other = pipe.recv_bytes()
        return [mine, other] if rank == 0 else [other, mine]
    return ferry.Group.custom(rank, 2, all_gather, lambda: (all_gather(b""), None)[1])
def peer(pipe):
    exchange = ferry.Exchange(make_group(1, pipe), **SETTINGS, deadline=30)
    time.sleep(2)
    report(lambda: exchange.metadata(1), "peer: ")
    os._exit(0)
here, there = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=peer, args=(there,))
child.start()
exchange = ferry.Exchange(make_group(0, here), **SETTINGS, deadline=30)
ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
signal_after(0.5, signal.SIGALRM)
signal_after(1)
report(lambda: exchange.metadata(1))
os.write(1, f"handled {len(ticks)}\\n".encode())
report(lambda: exchange.metadata(1))
child.join()
""")
    own = [line for line in lines if not line.startswith("peer: ")]
    peers = [line for line in lines if line.startswith("peer: ")]
    assert own[:2] == ["KeyboardInterrupt early ", "handled 1"]
    assert [line.split(" ")[0] for line in own[2:]] == ["PeerLostError"]
    assert [line.split(" ")[1] for line in peers] == ["PeerLostError"]
    assert "rank 0 was interrupted" in peers[0]


def test_signals_while_an_exception_is_made():
    """Signal handlers also run in the Python code that makes Ferry's exceptions; here they run there often."""
    assert run_program("""
exchange = ferry.Exchange(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None), **SETTINGS)
signal.signal(signal.SIGALRM, signal.default_int_handler)
errors = set()
for i in range(1000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + i % 50))
        while True:
            try:
                exchange.dispatch(X, IDS + 9)
            except ferry.BadIdError:
                pass
    except BaseException as error:
        errors.add(type(error).__name__)
os.write(1, f"{errors}\\n".encode())
""") == ["{'KeyboardInterrupt'}"]


def test_the_exception_of_a_handler():
    """The exception that a handler raises reaches the caller unchanged."""
    assert run_program("""
class Mine(Exception):
    pass
def handler(*_):
    raise Mine("of the handler")
signal.signal(signal.SIGTERM, handler)
def body(rank):
    exchange = ferry.Exchange(rank, **SETTINGS, deadline=30)
    exchange.metadata(1) if rank.index == 0 else time.sleep(2)
signal_after(1, signal.SIGTERM)
report(lambda: ferry.Group.threads(2).run(body))
""") == ["Mine early of the handler"]


def exit_codes(programs):
    """Runs programs at once; returns their exit codes and their standard errors."""
    started = [
        subprocess.Popen([sys.executable, "-c", START + program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for program in programs
    ]
    errors = [program.communicate(timeout=100)[1] for program in started]
    return [program.returncode for program in started], errors


def test_programs_end_with_the_exception_of_a_rank():
    """Many at once, so that the interpreter of some ends while the thread that ran the ranks still does."""
    raises = """
def body(rank):
    if rank.index == 2:
        raise ValueError("of rank 2")
    rank.barrier()
ferry.Group.threads(4).run(body)
"""
    codes, errors = exit_codes([raises] * 8)
    assert codes == [1] * 8, errors
    assert all("ValueError: of rank 2" in error for error in errors), errors


def test_a_program_ends_with_threads_left_behind():
    leaves = """
signal_after(0.2)
signal_after(0.4)
ferry.Group.threads(4).run(lambda rank: time.sleep(50))
"""
    codes, errors = exit_codes([leaves])
    assert codes == [-signal.SIGINT], errors
    assert errors[0].rstrip().endswith("KeyboardInterrupt"), errors


STUCK = """
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)  # gives the threads time while the interpreter ends
slow = Slow()
def stuck(*arguments):
    while True:
        try:
            time.sleep(0.001)
        except BaseException:
            pass
def never_ends(call):
    signal_after(0.3)
    signal_after(0.6)
    try:
        call()
    except KeyboardInterrupt:
        os.write(1, b"left\\n")
def daemon(call):
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.5)
class Meeting:
    def __init__(self, ranks):
        self.barrier, self.parts = threading.Barrier(ranks), [None] * ranks
    def gather(self, rank, mine):
        self.parts[rank] = mine
        self.barrier.wait()
        gathered = list(self.parts)
        self.barrier.wait()
        return gathered
    def group(self, rank, **functions):
        return ferry.Group.custom(rank, len(self.parts), lambda mine: self.gather(rank, mine),
                                  lambda: self.gather(rank, b""), **functions)
def repeat(call):
    while True:
        try:
            call()
        except BaseException:
            time.sleep(0.001)
"""

# Threads that hold Python objects, and are at work when the program ends.
LEFT_BEHIND = {
    "a function of a bootstrap": """
group = ferry.Group.custom(0, 2, stuck, stuck)
group.set_deadline(0.3)
report(group.join)
""",
    "functions of an engine": """
meeting = Meeting(2)
def body(rank):
    group = meeting.group(rank, all_to_all_v=stuck, abort=stuck)
    report(lambda: group.run(lambda member: ferry.Exchange(member, **SETTINGS, deadline=0.3, backend="collective").dispatch(X, IDS)))
threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
    "ranks in Python code": "never_ends(lambda: ferry.Group.threads(4).run(stuck))",
    "ranks in barriers": "never_ends(lambda: ferry.Group.threads(4).run(lambda rank: repeat(rank.barrier)))",
    "ranks in calls": """
def body(rank):
    exchange = ferry.Exchange(rank, **SETTINGS)
    repeat(lambda: exchange.dispatch(X, IDS))
never_ends(lambda: ferry.Group.threads(2).run(body))
""",
    "ranks that raise late": """
def body(rank):
    try:
        stuck_until(0.6 + 1 + 0.05)
    finally:
        raise ValueError("late")
def stuck_until(seconds, start=time.monotonic()):
    while time.monotonic() < start + seconds:
        try:
            time.sleep(0.001)
        except BaseException:
            pass
never_ends(lambda: ferry.Group.threads(4).run(body))
""",
    "a daemon thread in run()": """
def body(rank):
    while True:
        rank.barrier()
daemon(lambda: ferry.Group.threads(2).run(body))
""",
    "a daemon thread in calls": """
exchange = ferry.Group.threads(1).run(lambda rank: ferry.Exchange(rank, **SETTINGS))[0]
daemon(lambda: repeat(lambda: exchange.dispatch(X, IDS)))
""",
}


@pytest.mark.parametrize("left", LEFT_BEHIND)
def test_threads_do_not_touch_an_interpreter_that_has_ended(left):
    codes, errors = exit_codes([STUCK + LEFT_BEHIND[left]] * 4)
    assert codes == [0] * 4, errors
