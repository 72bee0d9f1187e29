"""Processes that torchrun's variables join, on this machine: each in a network namespace of its own, with links whose
rate they set themselves; directly, where namespaces cannot be made.

rank 0 in namespace 0, 10.77.0.1  ---- veth, tc tbf both ways ----  bridge  ---- ... ----  rank 1 in namespace 1
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PORT = "29617"
_BURST, _LATENCY = "128kb", "400ms"
"""What tc lets through at once; how long a packet may queue. The kernel cuts packets that are larger than the burst, 64
KiB into 44, on the cores that compute, where network cards would: with bursts of 32 kb a displaced step of a DiT at 1
Gbit/s took 0.286 s so, and takes 0.214."""
_HUB = "FXPIPE_HUB"  # in the environment of a rank: the namespace of the bridge
ROOT = str(Path(__file__).parents[2])

_CPU, _PERIOD = Path("/sys/fs/cgroup/cpu"), 2000
"""Control groups (version 1), and the microseconds in which a process has its share of a core once."""

Start = Callable[[Sequence[str]], str]
"""Runs a script with arguments on all ranks; what rank 0 has printed."""


@contextmanager
def namespaces(num_ranks: int, share: float | None = None) -> Iterator[Start]:
    """How to start ranks, which then go through `wires`; each has so much of a core, where it is said how much."""
    hub, spaces = f"fxpipe{os.getpid()}", [f"fxpipe{os.getpid()}_{rank}" for rank in range(num_ranks)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # what was made is taken away
    try:
        _join(hub, spaces)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"links cannot be throttled: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        _remove([hub, *spaces])
        yield lambda arguments: _started(arguments, [[]] * num_ranks, "127.0.0.1", {}, share)
        return
    try:
        prefixes = [["ip", "netns", "exec", space] for space in spaces]
        links = {_HUB: hub, "GLOO_SOCKET_IFNAME": "wire"}
        yield lambda arguments: _started(arguments, prefixes, "10.77.0.1", links, share)
    finally:
        _remove([hub, *spaces])


def wires(rates: Sequence[str], tell: Callable[[str], None]) -> Iterator[str]:
    """Those of the rates, as tc writes them ("1gbit"; "none" is the wire as it is), that this rank can have; each is
    set when it comes."""
    for rate in rates:
        if _HUB in os.environ:
            _throttle(rate)
        elif rate != "none":
            tell(f"{rate}: skipped, throttling needs root, ip and tc")
            continue
        yield rate


def _throttle(rate: str) -> None:
    """Lets this rank send and receive so fast."""
    for inside, end in ([], "wire"), (["ip", "netns", "exec", os.environ[_HUB]], f"end{os.environ['RANK']}"):
        with suppress(subprocess.CalledProcessError):  # where it was not throttled
            _run(*inside, "tc", "qdisc", "del", "dev", end, "root")
        if rate != "none":
            shaped = ("tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", _BURST)
            _run(*inside, *shaped, "latency", _LATENCY)


def _join(hub: str, spaces: Sequence[str]) -> None:
    """Namespaces with a link each to the bridge in the hub."""
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge", "up")
    for rank, space in enumerate(spaces):
        _run("ip", "netns", "add", space)
        pair = ("link", "add", f"end{rank}", "type", "veth", "peer", "name", "wire", "netns", space)
        _run("ip", "-n", hub, *pair)
        _run("ip", "-n", hub, "link", "set", f"end{rank}", "master", "bridge", "up")
        _run("ip", "-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "wire")
        _run("ip", "-n", space, "link", "set", "wire", "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")


def _remove(spaces: Sequence[str]) -> None:
    for space in spaces:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _give(pid: int, name: str, share: float) -> Path:
    """A process, and what it starts, so much of a core: a control group, to be removed when they have ended."""
    if not _CPU.is_dir():
        raise SystemExit(f"shares of a core need control groups of version 1, in {_CPU}")
    group = _CPU / name
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(f"{_PERIOD}")
    (group / "cpu.cfs_quota_us").write_text(f"{round(share * _PERIOD)}")
    (group / "cgroup.procs").write_text(f"{pid}")
    return group


def _started(
    arguments: Sequence[str], prefixes: Sequence[list[str]], address: str, links: dict[str, str], share: float | None
) -> str:
    processes, groups = list[subprocess.Popen[str]](), list[Path]()
    try:
        for rank, prefix in enumerate(prefixes):
            environment = os.environ | links | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(prefixes)), "MASTER_ADDR": address,
                "MASTER_PORT": _PORT, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT,
            }  # fmt: skip
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command = [*prefix, sys.executable, *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
            if share is not None:
                groups.append(_give(processes[-1].pid, f"fxpipe{os.getpid()}_{rank}", share))
        shown, _ = processes[0].communicate()
        if any([process.wait() for process in processes]):
            raise SystemExit(f"{' '.join(arguments)} failed")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for group in groups:
            group.rmdir()
    return shown or ""
