#!/usr/bin/env python3
"""Runs programs over three network namespaces, which stand for hosts: MPI between them goes over TCP.

Creates the namespaces and a bridge between them, and removes them at the end. Exits with 77 where it may not: that needs
root, `ip` and Open MPI's mpirun.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "harness"))
from namespaces import HOSTS, RANKS, host, ip, mpirun_command, namespaces, why_not  # noqa: E402

DEADLINE = 2  # seconds, as mpi_ranks sets it
SKIPPED = 77


class Job:
    """A program under mpirun, on two slots of each host."""

    def __init__(self, options, agent, network, directory, *arguments, program=None, ranks=RANKS):
        command, environment = mpirun_command(agent, network, ranks)
        environment["ASAN_OPTIONS"] = "detect_leaks=0"  # Open MPI leaks, and mpirun then waits for the ranks that fail at their end
        environment["FERRY_MPI_MODULE"] = str(options.module)
        command += ["-x", "FERRY_MPI_MODULE", str(program or options.program), *map(str, arguments)]
        # Not a pipe: daemons that mpirun has lost would keep it open.
        self.output = directory / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def kill(self):
        """mpirun itself may wait for ever for ranks that it has lost. Its daemons end with their namespaces."""
        self.process.kill()
        self.process.wait()


def wait_for_files(directory, names, seconds):
    """The names of the files that have come into being, with content unless they are marks."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        missing = [name for name in names if not (directory / name).exists()]
        if not missing:
            return
        time.sleep(0.05)
    raise AssertionError(f"missing after {seconds} s: {missing}")


def survivors_errors(directory, ranks):
    wait_for_files(directory, [f"error.{rank}" for rank in ranks], DEADLINE + 8)
    time.sleep(0.2)  # until the lines are written
    for rank in ranks:
        text = (directory / f"error.{rank}").read_text()
        seconds = float(text.split()[0])
        assert seconds < DEADLINE + 1, f"rank {rank}: {text}"
        yield rank, text


def output_of(job, seconds):
    """What a job prints that ends with status 0."""
    try:
        status = job.process.wait(timeout=seconds)
        assert status == 0, f"status {status}: {job.output.read_text()}"
        return job.output.read_text()
    finally:
        job.kill()


def check_gather(options, agent, network, directory):
    output_of(Job(options, agent, network, directory, "hosts", HOSTS), 40)


def check_contract(options, agent, network, directory):
    """The suite has no groups of 6 ranks: 4 ranks on hosts of 2, 2 and none."""
    tests = ("WeightedSums", "UnreducedRows", "RowValuesInBothDirections", "RankMajorRowsArePartialSums", "SumsAreWithin*")
    arguments = ["--gtest_brief=1", "--gtest_color=no", "--gtest_filter=" + ":".join(f"*Contract.{test}/*" for test in tests)]
    output = output_of(Job(options, agent, network, directory, *arguments, program=options.contract, ranks=4), 60)
    assert f"[  PASSED  ] {len(tests)} tests" in output, output


def check_run(options, agent, network, directory):
    """`ferry run` checks every number itself."""
    report = directory / "run.json"
    arguments = ["run", "--backend", "collective", "--steps", 2, "--tokens", 9, "--hidden", 128, "--inner", 16, "--trace",
                 "synth:decode:experts=16,top_k=4,tokens=64,layers=2", "--json", report]
    output_of(Job(options, agent, network, directory, *arguments, program=options.ferry), 60)
    run = json.loads(report.read_text())
    assert run["configuration"]["hops"] == "two", run["configuration"]
    assert run["configuration"]["node_of_rank"] == [0, 0, 1, 1, 2, 2], run["configuration"]
    assert run["configuration"]["reduction_level"] == "node" and not run["configuration"]["simulated_nodes"]
    assert all(check["passed"] for check in run["checks"]["list"]), run["checks"]


def check_killed_rank(options, agent, network, directory):
    """Rank 5 is killed: its neighbour 4 learns of it at once, the other hosts by the deadline."""
    job = Job(options, agent, network, directory, "lose", directory, RANKS - 1)
    try:
        for rank, text in survivors_errors(directory, range(RANKS - 1)):
            if rank == RANKS - 2:
                assert "PeerLostError" in text and f"rank {RANKS - 1} (process " in text, text
                assert float(text.split()[0]) < 1, text
            else:
                assert re.search(r"(TimeoutError .*another host|std::exception .*MPI: )", text), f"rank {rank}: {text}"
    finally:
        job.kill()


def check_cut_link(options, agent, network, directory):
    """The link of the third host goes down: every rank ends by its deadline."""
    job = Job(options, agent, network, directory, "lose", directory, -1)
    try:
        wait_for_files(directory, [f"started.{rank}" for rank in range(RANKS)], 30)
        ip("-n", host(HOSTS - 1), "link", "set", f"fi{os.getpid()}.{HOSTS - 1}", "down")
        for rank, text in survivors_errors(directory, range(RANKS)):
            assert "TimeoutError" in text and "another host" in text, f"rank {rank}: {text}"
    finally:
        job.kill()


def check_killed_rank_in_steps(options, agent, network, directory):
    """The same in dispatch and combine, in two hops over the engine `mpi`."""
    job = Job(options, agent, network, directory, "lose", directory, RANKS - 1, program=options.faults)
    try:
        for rank, text in survivors_errors(directory, range(RANKS - 1)):
            if rank == RANKS - 2:
                assert "peer lost: " in text and f"rank {RANKS - 1} (process " in text, text
                assert float(text.split()[0]) < 1, text
            else:
                assert re.search(r"^\S+ (timeout|peer lost): .*(dispatch|combine)", text), f"rank {rank}: {text}"
    finally:
        job.kill()


def check_cut_link_in_steps(options, agent, network, directory):
    job = Job(options, agent, network, directory, "lose", directory, -1, program=options.faults)
    try:
        wait_for_files(directory, [f"started.{rank}" for rank in range(RANKS)], 30)
        ip("-n", host(HOSTS - 1), "link", "set", f"fi{os.getpid()}.{HOSTS - 1}", "down")
        for rank, text in survivors_errors(directory, range(RANKS)):
            assert re.search(r"^\S+ timeout: .*(dispatch|combine)", text), f"rank {rank}: {text}"
    finally:
        job.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True, type=pathlib.Path)
    parser.add_argument("--module", required=True, type=pathlib.Path)
    parser.add_argument("--contract", type=pathlib.Path, help="the contract suite on MPI")
    parser.add_argument("--faults", type=pathlib.Path, help="ranks that make steps until one is lost")
    parser.add_argument("--ferry", type=pathlib.Path, help="the command-line program")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return SKIPPED
    checks = [check_gather, check_killed_rank, check_cut_link]
    checks += [check_killed_rank_in_steps, check_cut_link_in_steps] if options.faults else []
    checks += [check_contract] if options.contract else []
    checks += [check_run] if options.ferry else []
    for check in checks:
        print(f"== {check.__name__}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            directory = pathlib.Path(folder)
            with namespaces(directory) as (agent, network):
                check(options, agent, network, directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
