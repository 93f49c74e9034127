"""Nodes of a cluster on one machine: namespaces with a network, processes and ``/dev/shm`` apart.

Every node has two interfaces, as many a real one does: ``eth0``, by which the others are reached,
and ``lan0``, which leads nowhere and has the address of the host's name.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parent.parent
PORT = 6379
_LISTEN = "0A"
"""A state in the kernel's table of sockets."""
# A lost node is noticed after 4 x (1 + 2) s; with Ray's defaults it takes 5 x (3 + 10) s.
QUICK_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


def why_impossible() -> str | None:
    """What is missing for namespaces here; None if nothing is."""
    needed = "needs Linux, root (CAP_SYS_ADMIN, CAP_NET_ADMIN), iproute2 and util-linux"
    for tool in ("ip", "setpriv", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{needed}: {tool} is not there"
    name = f"nl{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"{needed}: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def listening(process: psutil.Process) -> set[str]:
    """IPv4 addresses that a process listens on, in whatever namespace (psutil looks in ours)."""
    folder = Path("/proc", str(process.pid))
    own, found = set(), set()
    for one in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(one.readlink()))
    for line in (folder / "net" / "tcp").read_text().splitlines()[1:]:
        _, address, _, state, *rest = line.split()
        if state == _LISTEN and f"socket:[{rest[5]}]" in own:
            number = bytes.fromhex(address.partition(":")[0])[::-1]
            found.add(str(IPv4Address(number)))
    return found


class Node:
    """One of them; its processes end with ``close``, whatever they do."""

    def __init__(self, network: "Network", index: int) -> None:
        self._network = network
        self._link = f"{network.name}v{index}"
        self._nowhere = f"{network.name}w{index}"
        self._namespace = f"{network.name}n{index}"
        self._folder = network.folder / f"node{index}"
        self.address = f"10.77.0.{index + 1}"
        self._init: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Make the namespaces and plug them in."""
        self._folder.mkdir()
        _ip("netns", "add", self._namespace)
        inside = ("-n", self._namespace)
        for link, interface in ((self._link, "eth0"), (self._nowhere, "lan0")):
            ends = ("type", "veth", "peer", interface, "netns", self._namespace)
            _ip("link", "add", link, *ends)
            _ip("link", "set", link, "up")
        _ip("link", "set", self._link, "master", self._network.name)
        nowhere = self.address.replace("10.77.0", "192.168.77")
        for interface, address in (("eth0", self.address), ("lan0", nowhere)):
            _ip(*inside, "address", "add", f"{address}/24", "dev", interface)
        for interface in ("lo", "eth0", "lan0"):
            _ip(*inside, "link", "set", interface, "up")
        hosts = self._folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{nowhere} {self._namespace}\n")
        script = (
            f"mount -t tmpfs shm /dev/shm && mount --bind {hosts} /etc/hosts && "
            f"hostname {self._namespace} && echo up && sleep infinity & wait"
        )
        # Ends with us, should we be killed; the names of the namespaces stay then, empty.
        ends = ("setpriv", "--pdeathsig", "KILL")
        unshare = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, *ends, *unshare, "bash", "-c", script],
            stdout=subprocess.PIPE,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"up\n", "the node's namespaces could not be set up"

    def close(self) -> None:
        """End every process, then take the namespaces away."""
        if self._init is not None:
            self._init.kill()
            self._init.wait()
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True, check=False)

    def popen(self, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Begin a command on this node, in the repository's root."""
        assert self._init is not None
        (inside,) = psutil.Process(self._init.pid).children()
        return subprocess.Popen(  # pyright: ignore
            ["nsenter", "--target", str(inside.pid), "--all", f"--wd={ROOT}", *command],
            text=True,
            env=self._network.environment,
            **options,
        )

    def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Exit code and all output of a command."""
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{command} ran for {timeout_s} s:\n{output}") from None
        return process.returncode, output

    def start_ray(self, num_cpus: int) -> None:
        """Join the cluster of the first node, or found it."""
        head = self._network.nodes[0]
        where = [f"--address={head.address}:{PORT}"]
        if self is head:
            where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        ray = [str(Path(sys.executable).parent / "ray"), "start", *where]
        sizes = [f"--num-cpus={num_cpus}", "--object-store-memory=100000000"]
        folder = f"--temp-dir={self._folder}/ray"
        code, output = self.run(
            [*ray, *sizes, f"--node-ip-address={self.address}", folder, "--disable-usage-stats"],
            timeout_s=150,
        )
        assert code == 0, output

    def cut(self) -> None:
        """Pull the plug of ``eth0``."""
        _ip("link", "set", self._link, "down")

    def restore(self) -> None:
        """Put it in again."""
        _ip("link", "set", self._link, "up")

    def processes(self, text: str) -> list[psutil.Process]:
        """Those whose command line has ``text``."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace], capture_output=True, text=True, check=True
        )
        found = []
        for pid in map(int, listed.stdout.split()):
            try:
                process = psutil.Process(pid)
                if text in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


class Network:
    """``len(cpus)`` nodes with Ray, on one wire; a context manager. The first node is the head."""

    def __init__(self, folder: Path, cpus: Sequence[int], **environment: str) -> None:
        self.name = f"nl{os.getpid()}"
        self.folder = folder
        self._cpus = cpus
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        settings = {
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": f"10.77.0.1:{PORT}",
            "RAY_raylet_start_wait_time_s": "120",  # for machines that have other things to do
        }
        self.environment = os.environ | settings | token | environment
        self.nodes = [Node(self, index) for index in range(len(cpus))]
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # From the host no address leads there, so that networks may have the same ones.
            _ip("link", "add", self.name, "type", "bridge")
            stack.callback(_ip, "link", "del", self.name)
            _ip("link", "set", self.name, "up")
            for node in self.nodes:
                stack.callback(node.close)
                node.open()
            head, *others = self.nodes
            head.start_ray(self._cpus[0])
            # Two at a time: a node's Ray ends if its own helpers take long to start.
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(Node.start_ray, others, self._cpus[1:]))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
