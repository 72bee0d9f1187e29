"""Two processes that torchrun's variables join, on this machine: directly, or each in a network namespace of its own
with a throttled link between them.

rank 0 in namespace a, 10.77.0.1  ---- veth pair, tc tbf both ways ----  rank 1 in namespace b, 10.77.0.2
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PORT = "29617"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BURST = "64kb"  # what tc lets through at once; LATENCY is how long a packet may queue
_LATENCY = "400ms"
ROOT = str(Path(__file__).parents[2])

Start = Callable[[list[str]], str]
"""Runs a script with arguments on both ranks; what rank 0 has printed."""


@contextmanager
def two_namespaces(rate: str | None) -> Iterator[Start]:
    """How to start two ranks; `rate` of the link as tc writes it, unrestricted where None."""
    if rate is None:
        yield lambda arguments: _started(arguments, ([], []), "127.0.0.1", None)
        return
    names = [f"fxpipe{os.getpid()}{side}" for side in "ab"]
    ends = [f"fx{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, _ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            _run("ip", "link", "set", end, "netns", name)
            _run(*inside, "addr", "add", f"{address}/24", "dev", end)
            _run(*inside, "link", "set", end, "up")
            _run(*inside, "link", "set", "lo", "up")
            shaped = ("tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", _BURST)
            _run("ip", "netns", "exec", name, *shaped, "latency", _LATENCY)
        prefixes = tuple(["ip", "netns", "exec", name] for name in names)
        yield lambda arguments: _started(arguments, prefixes, _ADDRESSES[0], ends)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _started(arguments: list[str], prefixes: tuple[list[str], ...], address: str, ends: list[str] | None) -> str:
    processes = []
    for rank, prefix in enumerate(prefixes):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address,
            "MASTER_PORT": _PORT, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT,
        }  # fmt: skip
        if ends is not None:
            environment["GLOO_SOCKET_IFNAME"] = ends[rank]
        command = [*prefix, sys.executable, *arguments]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
    shown, _ = processes[0].communicate()
    if any([process.wait() for process in processes]):
        raise SystemExit(f"{' '.join(arguments)} failed")
    return shown or ""
