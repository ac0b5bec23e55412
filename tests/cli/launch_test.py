"""ferry launch: one process for each rank, which meet, fail and end together."""

import os
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from program import PROGRAM, ProgramTest, ferry

RANK = os.environ["FERRY_LAUNCHED_RANK"]


def attack():
    """A process of another user that connects to every socket of Ferry, and sends it messages with files."""
    process = os.fork()
    if process != 0:
        return process
    os.setuid(65534)
    connections, file = [], tempfile.TemporaryFile()
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    while True:
        with open("/proc/net/unix", encoding="utf-8") as table:
            names = [line.split()[-1] for line in table if "@ferry" in line]
        for name in names:
            address = "\0" + name[1:]
            for _ in range(50):
                try:
                    socket.send_fds(sender, [os.urandom(24)], [file.fileno()] * 2, address=address)
                except OSError:
                    pass
                connections.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connections[-1].setblocking(False)
                try:
                    connections[-1].connect(address)
                except OSError:
                    pass
        del connections[:-500]


class LaunchTest(ProgramTest):
    def test_ranks_meet(self):
        for ranks in (1, 2, 5):
            with self.subTest(ranks=ranks):
                lines = self.succeed("launch", "-n", ranks, RANK, "gather").splitlines()
                total = ranks * (ranks + 1) // 2
                self.assertEqual(sorted(lines), sorted(2 * [f"rank {r} of {ranks}: {total}" for r in range(ranks)]))

    def test_the_c_interface(self):
        self.assertEqual(self.succeed("launch", "-n", 2, RANK, "c"), "joined\njoined\n")

    def test_options_of_the_program_are_its_own(self):
        self.assertEqual(self.succeed("launch", "-n", 1, "echo", "-n", "--ranks", "7"), "--ranks 7")

    def test_a_python_file_is_run_by_python(self):
        script = self.path("script.py")
        with open(script, "w", encoding="utf-8") as file:
            # In one piece, because both processes write to one pipe.
            file.write("import os, sys; sys.stdout.write(os.environ['FERRY_LAUNCH'].split('@')[0] + f' {sys.argv[1]}\\n')")
        lines = self.succeed("launch", "-n", 2, script, "--flag").splitlines()
        self.assertEqual(sorted(lines), ["0/2 --flag", "1/2 --flag"])

    def test_a_rank_that_ends_before_the_others_have_met(self):
        done = ferry("launch", "-n", 3, RANK, "end-early", timeout=8)
        self.assertEqual(done.returncode, 1)
        lost = r"rank 1 is lost: rank 1 \(process \d+\) exited with status 3"
        self.assertRegex(done.stdout, rf"\A{lost}\n{lost}\n\Z")
        self.assertRegex(done.stderr, r"rank 1 \(process \d+\) exited with status 3\n")
        self.assertRegex(done.stderr, r"rank 2 \(process \d+\) exited with status 5\n")

    def test_the_log_names_ranks_and_failures(self):
        done = ferry("launch", "-n", 2, RANK, "gather", environment={"FERRY_LOG": "1"})
        joined = r"ferry: rank \d of 2 has joined: process \d+, local rank \d of node 0, nodes 1\n"
        self.assertRegex(done.stderr, rf"\A({joined}){{4}}\Z")
        self.assertEqual(ferry("launch", "-n", 2, RANK, "gather", environment={"FERRY_LOG": "0"}).stderr, "")

    def test_signals_reach_the_ranks_and_nothing_is_left(self):
        command = [PROGRAM, "launch", "-n", "2", RANK, "ignore-signals"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
            self.assertEqual([job.stdout.readline() for _ in range(2)], 2 * ["ready\n"])
            begin = time.monotonic()
            job.send_signal(signal.SIGINT)
            out, errors = job.communicate(timeout=20)
        self.assertLess(time.monotonic() - begin, 10)
        self.assertEqual((job.returncode, out), (1, ""))
        self.assertEqual(errors.count("was killed by signal 9 (Killed), because it did not end in time"), 2, errors)

    @unittest.skipUnless(os.getuid() == 0, "needs root to become another user")
    def test_another_user_cannot_harm_the_job(self):
        strangers = [attack() for _ in range(4)]
        try:
            for _ in range(5):
                self.assertEqual(self.succeed("launch", "-n", 16, RANK, "c"), 16 * "joined\n")
        finally:
            for stranger in strangers:
                os.kill(stranger, signal.SIGKILL)
                os.waitpid(stranger, 0)

    def test_short_queues(self):
        shorten = "sysctl -qw net.core.somaxconn=2 net.unix.max_dgram_qlen=1 && exec \"$0\" \"$@\""
        if subprocess.run(["unshare", "-n", "sh", "-c", shorten, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("needs root and sysctl to have a network of its own")
        done = subprocess.run(["unshare", "-n", "sh", "-c", shorten, PROGRAM, "launch", "-n", "24", RANK, "c"],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, 24 * "joined\n"), done.stderr)

    def test_refusals(self):
        self.refuse(3, ["cannot start", "/no/such/program", "No such file"], "launch", "-n", 2, "/no/such/program")
        self.refuse(2, ["PROGRAM is required"], "launch", "-n", 2)
        self.refuse(2, ["-n RANKS is required"], "launch")
        self.refuse(2, ["-n RANKS is required"], "launch", "true")
        self.refuse(2, ["--ranks"], "launch", "-n", 0, "true")
        done = subprocess.run([RANK, "gather"], capture_output=True, text=True, env={}, check=False)
        self.assertIn("start the program with `ferry launch -n RANKS PROGRAM`", done.stderr)


if __name__ == "__main__":
    unittest.main()
