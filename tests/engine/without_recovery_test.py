#!/usr/bin/env python3
"""A rank is killed under an mpirun that nobody told to let the others live: mpirun ends them all, and nothing is left behind."""

import os
import pathlib
import subprocess
import sys
import time


def processes(program):
    """Those that run the program, apart from zombies, which have no executable."""
    found = []
    for link in pathlib.Path("/proc").glob("[0-9]*/exe"):
        try:
            if link.readlink() == program:
                found.append(link.parent.name)
        except OSError:
            continue  # it has ended, or belongs to another user
    return set(found)


def main():
    mpiexec, program = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    shared = pathlib.Path(os.environ.get("FERRY_SHM_DIR", "/dev/shm"))
    others, files = processes(program), set(shared.iterdir())
    environment = {name: value for name, value in os.environ.items() if "enable_recovery" not in name}
    begun = time.monotonic()
    done = subprocess.run([mpiexec, "-n", "3", program, "kill"], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=30)
    seconds = time.monotonic() - begun
    assert done.returncode != 0, done.stdout
    assert seconds < 15, f"mpirun ended after {seconds:.1f} s, the deadline of the ranks is 20 s:\n{done.stdout}"
    end = time.monotonic() + 5
    while processes(program) - others and time.monotonic() < end:
        time.sleep(0.05)
    left = processes(program) - others
    assert not left, f"processes {left} still run"
    # Tests that run at the same time have folders named ferry-test-.
    mine = {file.name for file in set(shared.iterdir()) - files
            if "ferry" in file.name and not file.name.startswith("ferry-test-") and file.owner() == pathlib.Path("/proc/self").owner()}
    assert not mine, f"left in {shared}: {mine}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
