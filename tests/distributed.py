"""Runs ranks as processes in a test: a function of a test file, once per rank, plainly or under torchrun.

    def rank_main(steps: str) -> torch.Tensor: ...   # in a test file, at its top level; arguments are strings

    results = run_processes(2, rank_main, "3")        # what each rank returned, pickled
    ended = start_processes(2, rank_main, "3")        # exit codes and output, for tests of failures

Plain ranks are forked from one process, which this one has forked when it had imported every test file.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "fxpipe.compiler", "fxpipe.sample_compiler", "fxpipe.run.transport.distributed", "fxpipe.run.transport.launched",
    # What a first capture or plan imports.
    "torch.export._trace", "torch.fx.experimental.validator", "sympy.combinatorics", "sympy.tensor.tensor",
)  # fmt: skip
"""Once, before ranks are forked: or every one of them would, for half of its time."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code (negative: its signal; None: timed out), its output, its result."""

    returncode: int | None
    output: str
    result: Any = None


def run_processes(
    world_size: int, function: Callable[..., Any], *arguments: str, timeout_seconds: float = 120
) -> list[Any]:
    """What `function` returned on every rank; AssertionError with every rank's output when one did not end well."""
    ended = start_processes(world_size, function, *arguments, timeout_seconds=timeout_seconds)
    outputs = "\n".join(f"--- rank {rank}: exit code {e.returncode}\n{e.output}" for rank, e in enumerate(ended))
    assert all(e.returncode == 0 for e in ended), outputs
    return [e.result for e in ended]


def start_processes(
    world_size: int, function: Callable[..., Any], *arguments: str, timeout_seconds: float = 120
) -> list[Ended]:
    """One process per rank with torchrun's variables but no torchrun; all are killed at the timeout."""
    with tempfile.TemporaryDirectory() as folder:
        ask, hear = forks()
        target = _target(function, folder, arguments)
        print(json.dumps([world_size, timeout_seconds, _environment(), target]), file=ask, flush=True)
        codes, failure = json.loads(hear.readline())
        assert not failure, failure
        return [
            Ended(code, Path(folder, f"{rank}.txt").read_text(), _result(folder, rank))
            for rank, code in enumerate(codes)
        ]


@cache
def forks() -> tuple[TextIO, TextIO]:
    """To and from a process that forks ranks, a line of JSON asking for them and a line answering, until this one has
    ended. It is forked from this one, and so to be called before any thread here has locks that it would wait for."""
    (asked, ask), (hear, answer) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist has a thread that hears
        process = os.fork()
    if process == 0:
        os.close(ask)
        os.close(hear)
        try:
            _serve(os.fdopen(asked), os.fdopen(answer, "w"))
        finally:
            os._exit(0)
    os.close(asked)
    os.close(answer)
    return os.fdopen(ask, "w"), os.fdopen(hear)


def start_torchrun(
    world_size: int, function: Callable[..., Any], *arguments: str, timeout_seconds: float = 120, restarts: int = 0
) -> tuple[Ended, list[Any]]:
    """The same under torchrun: how torchrun ended, with all ranks' output, and each rank's result."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        torchrun += [f"--max-restarts={restarts}"]
        command = [sys.executable, *torchrun, __file__, *_target(function, folder, arguments)]
        ended = _run(command, Path(folder, "all.txt"), timeout_seconds)
        return ended, [_result(folder, rank) for rank in range(world_size)]


def _target(function: Callable[..., Any], folder: str, arguments: tuple[str, ...]) -> list[str]:
    return [function.__module__, function.__name__, folder, *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _result(folder: str, rank: int) -> Any:
    path = Path(folder, f"{rank}.pickle")
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _run(command: list[str], output: Path, timeout_seconds: float) -> Ended:
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # torchrun ends its ranks on SIGTERM, which SIGKILL leaves running
            process.wait(60)
    return Ended(code, output.read_text())


def _run_rank(module: str, name: str, folder: str, *arguments: str) -> None:
    result = getattr(importlib.import_module(module), name)(*arguments)
    Path(folder, f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(result))


def _serve(asked: TextIO, answers: TextIO) -> None:
    """Forks ranks for every line that is asked and answers with their exit codes, or with why there are none."""
    gc.disable()  # imports make many objects and no cycles
    os.chdir(ROOT)
    _forget_pytest()
    for line in asked:
        world_size, timeout_seconds, environment, target = json.loads(line)
        codes, failure = [], ""
        try:
            for module in (*IMPORTED, target[0]):
                importlib.import_module(module)
            codes = _fork_ranks(world_size, timeout_seconds, environment, target)
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps([codes, failure]), file=answers, flush=True)


def _forget_pytest() -> None:
    """Ranks warn, print, log and end as in a process of their own."""
    importlib.reload(warnings)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    logging.root.handlers.clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    faulthandler.disable()
    atexit._clear()


def _fork_ranks(
    world_size: int, timeout_seconds: float, environment: dict[str, str], target: list[str]
) -> list[int | None]:
    """Exit codes of a child per rank, once all have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            os.environ.clear()
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            output = os.open(Path(target[2], f"{rank}.txt"), os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            gc.freeze()
            gc.enable()
            _leave(lambda: _run_rank(*target))
        processes.append(process)
    codes = _wait_for(processes, time.monotonic() + timeout_seconds)
    return [codes[process] for process in processes]


def _wait_for(processes: list[int], deadline: float) -> dict[int, int | None]:
    """Exit codes by process; those still running at the deadline are killed and have None."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(processes):
        for process in set(processes) - set(codes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[process] = None
        time.sleep(0.02)
    return codes


def _leave(call: Callable[[], None]) -> NoReturn:
    """Runs `call` and ends this process as Python would, less the teardown of modules: seconds in a forked process."""
    code = 0
    try:
        call()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else leaving.code is not None
    except BaseException as error:
        sys.last_value = error  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _run_rank(*sys.argv[1:])
