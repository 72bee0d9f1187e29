"""What timing on a device needs: its name and memory, waiting for it, and what to expect after many runs."""

import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch


def wait_for(device: torch.device) -> None:
    """Until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """Seconds on a clock for what this thread computes, all of it done.

    Where it computes alone, of the time that it runs: what other processes take of its core is not counted, so that a
    busy machine is measured as an idle one.
    """
    wait_for(device)
    return time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def expected(seconds: Sequence[float]) -> float:
    """Mean without the slowest and the fastest tenth. Times of parts are added up; medians of skewed ones fall short of
    their sum."""
    rest = sorted(seconds)[len(seconds) // 10 : len(seconds) - len(seconds) // 10]
    return statistics.fmean(rest)


def device_name(device: torch.device) -> str:
    """A GPU by its name, a processor by its own and torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def device_bytes(device: torch.device) -> int | None:
    """A GPU's memory; None for a processor, whose memory ranks share with whatever else runs there."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
