"""ferry launch: one process for each rank, which meet, fail and end together."""

import os
import pty
import resource
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from program import PROGRAM, ProgramTest, ferry

RANK = os.environ["FERRY_LAUNCHED_RANK"]


def state_of(process):
    """The state letter of /proc; Z or empty after the process has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def runs(process):
    return state_of(process) not in ("Z", "")


def children_of(process):
    with open(f"/proc/{process}/task/{process}/children", encoding="utf-8") as file:
        return [int(child) for child in file.read().split()]


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


class Terminal:
    """A program in the foreground of a terminal."""

    def __init__(self, *command):
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.execv(command[0], command)
        self.output, self.ended = b"", False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if not self.ended:
            os.kill(self.process, signal.SIGKILL)
            self.wait()
        os.close(self.terminal)

    def write(self, text):
        os.write(self.terminal, text.encode())

    def line(self):
        """The next one that the terminal did not echo."""
        while True:
            while b"\r\n" not in self.output:
                self.output += os.read(self.terminal, 1000)
            line, _, self.output = self.output.partition(b"\r\n")
            for echo in (b"^Z", b"^C"):
                line = line.replace(echo, b"")
            if line not in (b"", b"this"):
                return line.decode()

    def wait(self):
        self.ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


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
        self.assertEqual(done.returncode, 3)
        lost = r"rank 1 is lost: rank 1 \(process \d+\) exited with status 3"
        self.assertRegex(done.stdout, rf"\A{lost}\n{lost}\n\Z")
        self.assertRegex(done.stderr, r"rank 1 \(process \d+\) exited with status 3\n")
        self.assertRegex(done.stderr, r"rank 2 \(process \d+\) exited with status 5\n")

    def test_the_log_names_ranks_and_failures(self):
        done = ferry("launch", "-n", 2, RANK, "gather", environment={"FERRY_LOG": "1"})
        joined = r"ferry: rank \d of 2 has joined: process \d+, local rank \d of node 0, nodes 1\n"
        self.assertRegex(done.stderr, rf"\A({joined}){{4}}\Z")
        self.assertEqual(ferry("launch", "-n", 2, RANK, "gather", environment={"FERRY_LOG": "0"}).stderr, "")

    def test_the_first_failure_is_the_exit_status(self):
        for words, status in [("exit 7", 7), ("kill -9 $$", 137), ("exit 255", 255)]:
            self.assertEqual(ferry("launch", "-n", 1, "sh", "-c", words).returncode, status, words)
        lasting = "case $FERRY_LAUNCH in 1/*) exit 4;; esac; trap 'exit 5' TERM; while :; do sleep 0.1; done"
        done = ferry("launch", "-n", 2, "sh", "-c", lasting, timeout=20)
        self.assertEqual(done.returncode, 4, done.stderr)

    def test_two_dashes_stand_before_the_program(self):
        for words in (["echo", "a"], ["echo", "--", "-n", "3"], ["sh", "-c", "echo $0 $1", "--", "-n"]):
            expected = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            for dashes in ([], ["--"]):
                with self.subTest(words=words, dashes=dashes):
                    self.assertEqual(self.succeed("launch", "-n", 1, *dashes, *words), expected)
        self.refuse(2, ["PROGRAM is required"], "launch", "-n", 1, "--")

    def start(self, *arguments, ranks=2, **options):
        """A job whose ranks print their process numbers, and these."""
        job = subprocess.Popen([PROGRAM, "launch", "-n", str(ranks), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, **options)
        self.addCleanup(job.communicate)
        self.addCleanup(job.kill)
        return job, [int(job.stdout.readline()) for _ in range(ranks)]

    def expect_ended(self, processes, seconds):
        deadline = time.monotonic() + seconds
        while any(map(runs, processes)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in filter(runs, processes):
            os.kill(process, signal.SIGKILL)
            self.fail(f"process {process} has outlived the job")

    def test_what_a_signal_does_not_end_is_killed(self):
        jobs = {name: self.start(RANK, "ignore-signals")[0] for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
        begin = time.monotonic()
        for name, job in jobs.items():
            job.send_signal(name)
        for name, job in jobs.items():
            with self.subTest(name):
                out, errors = job.communicate(timeout=20)
                self.assertLess(time.monotonic() - begin, 10)
                self.assertEqual((job.returncode, out), (137, ""))
                self.assertEqual(errors.count("was killed by signal 9 (Killed), because it did not end in time"), 2, errors)

    def test_later_signals_do_not_postpone_the_end(self):
        job, ranks = self.start(RANK, "ignore-signals")
        begin = time.monotonic()
        while job.poll() is None and time.monotonic() - begin < 10:
            job.send_signal(signal.SIGINT)
            time.sleep(0.2)
        self.assertLess(time.monotonic() - begin, 8)
        self.expect_ended(ranks, 0)

    def test_nothing_outlives_the_job(self):
        wrappers = {
            "no wrapper": [RANK, "ignore-signals"],
            "a shell": ["sh", "-c", '"$0" ignore-signals; true', RANK],
            "a shell in a shell": ["sh", "-c", "sh -c '\"$0\" ignore-signals; true' \"$0\"; true", RANK],
            "another group": ["sh", "-c", 'timeout 60 "$0" ignore-signals; true', RANK],
            "another session": ["sh", "-c", 'setsid -w "$0" ignore-signals; true', RANK],
            "a job in the job": [PROGRAM, "launch", "-n", "1", "sh", "-c", '"$0" ignore-signals; true', RANK],
        }
        ends = {
            "a signal": lambda job, ranks: job.terminate(),
            "a killed command": lambda job, ranks: job.kill(),
            "a killed launcher": lambda job, ranks: [os.kill(child, signal.SIGKILL) for child in children_of(job.pid)],
            "a killed rank": lambda job, ranks: os.kill(ranks[0], signal.SIGKILL),
        }
        for end, act in ends.items():
            fit = ["no wrapper"] if end == "a killed rank" else wrappers  # shells of these end with 0
            jobs = {wrapper: self.start(*wrappers[wrapper]) for wrapper in fit}
            for job, ranks in jobs.values():
                act(job, ranks)
            for wrapper, (job, ranks) in jobs.items():
                with self.subTest(wrapper=wrapper, end=end):
                    self.expect_ended(ranks, 20 if end == "a killed rank" else 10)
                    self.assertNotEqual(job.wait(timeout=10), 0)

    def test_what_ranks_leave_is_theirs_if_all_succeed(self):
        job, ranks = self.start("sh", "-c", '"$0" ignore-signals 2> /dev/null & exit 0', RANK)
        self.addCleanup(lambda: [os.kill(rank, signal.SIGKILL) for rank in ranks])
        self.assertEqual(job.wait(timeout=10), 0)
        self.assertTrue(all(map(runs, ranks)))

    def test_a_terminal(self):
        with Terminal(PROGRAM, "launch", "-n", "2", RANK, "count-interrupts") as terminal:
            ranks = [int(terminal.line()) for _ in range(2)]
            terminal.write("\x1a")  # Ctrl-Z
            self.assertTrue(os.WIFSTOPPED(os.waitpid(terminal.process, os.WUNTRACED)[1]))
            self.expect_states(ranks, "T")
            os.kill(terminal.process, signal.SIGCONT)
            self.expect_states(ranks, "SR")
            terminal.write("\x03")  # Ctrl-C
            self.assertEqual([terminal.line() for _ in range(2)], 2 * ["1 interrupts"])
            self.assertEqual(terminal.wait(), 0)
        with Terminal(PROGRAM, "launch", "-n", "1", "sh", "-c", "read word; echo got $word") as terminal:
            terminal.write("this\n")
            self.assertEqual(terminal.line(), "got this")

    def expect_states(self, processes, states):
        deadline = time.monotonic() + 5
        while not all(state_of(process) in states for process in processes):
            self.assertLess(time.monotonic(), deadline, [state_of(process) for process in processes])
            time.sleep(0.01)

    def test_few_files(self):
        def limit(soft, hard):
            return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        command = [PROGRAM, "launch", "-n", "40", RANK, "c"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit(32, hard), check=False)
        self.assertEqual((done.returncode, done.stdout), (0, 40 * "joined\n"), done.stderr)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit(32, 64), check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], r"^ferry: cannot .* rank \d+: Too many open files: the limit is 64, "
                         r"and 40 ranks need more than 80: raise it \(ulimit -n\)$")

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
