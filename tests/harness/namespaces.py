"""Three network namespaces on a bridge, which stand for hosts: MPI between them goes over TCP. Needs root."""

import contextlib
import os
import shutil
import signal
import subprocess

HOSTS = 3
RANKS_PER_HOST = 2
RANKS = HOSTS * RANKS_PER_HOST


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def host(index):
    return f"ferry{os.getpid()}h{index}"


@contextlib.contextmanager
def namespaces(directory, rate=None):
    """Yields when the hosts can reach each other and this namespace, where mpirun runs.

    `rate`, as `tc tbf` takes it, bounds what each host sends, such as 1gbit.
    """
    # Names of interfaces have 15 characters at most.
    bridge, number = f"fb{os.getpid()}", os.getpid() % 250
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"10.{number}.77.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index in range(HOSTS):
            outer, inner = f"fo{os.getpid()}.{index}", f"fi{os.getpid()}.{index}"
            ip("netns", "add", host(index))
            ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", inner, "netns", host(index))
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", host(index), "addr", "add", f"10.{number}.77.{index + 1}/24", "dev", inner)
            ip("-n", host(index), "link", "set", inner, "up")
            ip("-n", host(index), "link", "set", "lo", "up")
            if rate:
                shape = ["tc", "qdisc", "add", "dev", inner, "root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
                subprocess.run(["ip", "netns", "exec", host(index), *shape], check=True)
        # Stands where ssh would: enters the namespace of that name. The hosts share /tmp, where Open MPI's daemons of one
        # job would write to the same folder.
        agent = directory / "agent.sh"
        agent.write_text(
            f'#!/bin/sh\nhost=$1\nshift\nexport TMPDIR={directory}/$host\nmkdir -p "$TMPDIR"\n'
            'exec ip netns exec "$host" sh -c "$*"\n'
        )
        agent.chmod(0o700)
        yield agent, f"10.{number}.77.0/24"
    finally:
        for index in range(HOSTS):
            for process in ip("netns", "pids", host(index), check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "del", host(index), check=False)
            ip("link", "del", f"fo{os.getpid()}.{index}", check=False)  # removes both ends, if they are still there
        ip("link", "del", bridge, check=False)


def why_not():
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("mpirun"):
        return "needs root, ip and mpirun"
    if ip("netns", "add", host("probe"), check=False).returncode != 0:
        return "this system does not allow network namespaces"
    ip("netns", "del", host("probe"))
    return None


def mpirun_command(agent, network, ranks=RANKS):
    """mpirun on two slots of each host, and the environment that it needs."""
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    slots = ",".join(f"{host(index)}:{RANKS_PER_HOST}" for index in range(HOSTS))
    mca = {
        "plm": "rsh",
        "plm_rsh_agent": agent,
        "btl": "tcp,self",
        "btl_tcp_if_include": network,
        "oob_tcp_if_include": network,
        "mpi_yield_when_idle": "1",
    }
    command = ["mpirun", "--enable-recovery", "--host", slots, "-n", str(ranks)]
    for name, value in mca.items():
        command += ["--mca", name, str(value)]
    return command, environment
