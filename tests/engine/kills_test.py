#!/usr/bin/env python3
"""Ranks of MPI jobs are killed at random moments, from the first call to the end of the program: every other process ends by itself.

kills_test.py MPIEXEC KILLS RANKS -- PROGRAM ARGUMENT... [-- PROGRAM ARGUMENT...]: KILLS jobs of RANKS ranks, of the programs in turn, which
run for about a second.
"""

import os
import pathlib
import random
import re
import select
import signal
import subprocess
import sys
import time

START_SECONDS = 60  # of a job on a busy machine
WORK_SECONDS = 1.3  # from the first call to the end of an undisturbed program
END_SECONDS = 25  # of the survivors: the deadline of a call, and what a busy machine takes
FAULTS = ("received signal", "terminate called", "Fatal Python error")


def runs(process):
    """Whether the process exists and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Job:
    """An mpirun that lets survivors live, and what it has written."""

    def __init__(self, mpiexec, ranks, command):
        environment = {**os.environ, "FERRY_LOG": "1", "OMPI_MCA_orte_enable_recovery": "1"}
        self.ranks = ranks
        self.mpirun = subprocess.Popen([mpiexec, "-n", str(ranks), *command], env=environment, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.text = ""

    def read(self, seconds):
        """Reads for so long, or until mpirun has closed its output."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.mpirun.stdout], [], [], left)[0]:
                break
            part = os.read(self.mpirun.stdout.fileno(), 65536)
            if not part:
                time.sleep(left)
                break
            self.text += part.decode(errors="replace")

    def processes(self):
        """Those of the ranks, by rank, once all have made their exchange."""
        end = time.monotonic() + START_SECONDS
        while len(set(re.findall(r"rank (\d+) of \d+ has made an exchange", self.text))) < self.ranks:
            assert time.monotonic() < end, f"the job has not started:\n{self.text}"
            self.read(0.02)
        return {int(rank): int(process) for rank, process in re.findall(r"rank (\d+) of \d+ has joined: process (\d+)", self.text)}

    def end(self):
        self.mpirun.kill()
        self.mpirun.wait()


def kill_a_rank(mpiexec, count, command, numbers):
    """Returns what is wrong."""
    job = Job(mpiexec, count, command)
    ranks = {}
    try:
        ranks = job.processes()
        job.read(numbers.uniform(0, WORK_SECONDS))
        victim = numbers.randrange(count)
        if runs(ranks[victim]):
            os.kill(ranks[victim], signal.SIGKILL)
        end = time.monotonic() + END_SECONDS
        while any(runs(process) for process in ranks.values()) and time.monotonic() < end:
            job.read(0.05)
        left = {rank: process for rank, process in ranks.items() if runs(process)}
        job.read(0.05)
        found = [fault for fault in FAULTS if fault in job.text]
        return f"rank {victim} was killed; still running: {left}; {found}\n{job.text}" if left or found else ""
    finally:
        job.end()
        for process in ranks.values():
            if runs(process):
                os.kill(process, signal.SIGKILL)


def main():
    mpiexec, kills, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    commands = []
    for argument in sys.argv[4:]:
        commands.append([]) if argument == "--" else commands[-1].append(argument)
    seed = int(os.environ.get("FERRY_SEED", time.time_ns() % 2**32))
    print(f"FERRY_SEED={seed}", flush=True)
    numbers = random.Random(seed)
    failures = 0
    for kill in range(kills):
        command = commands[kill % len(commands)]
        wrong = kill_a_rank(mpiexec, ranks, command, numbers)
        failures += wrong != ""
        if wrong:
            print(f"kill {kill} of {' '.join(command)}: {wrong}", flush=True)
    print(f"{kills - failures} of {kills} jobs ended by themselves")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
