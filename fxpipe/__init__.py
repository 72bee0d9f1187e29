"""fxpipe compiles diffusion models for several devices.

compiler       the whole story; options, step and program are what goes in and comes out
artefacts      capture, block_graph, staged, schedule, rank_program: each with a text form, and a check beside it
numbers        costs (of nodes, blocks, calls), cluster (links), memory, simulation, prediction, profiling
running        transport, engine, training, verification; emulation on devices that sleep
people         cli, dump, report, timeline, trace_format
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.errors import CaptureError, CompileError, FxpipeError, RunError, ScheduleError

if TYPE_CHECKING:
    from fxpipe.cluster import Cluster
    from fxpipe.compiler import compile
    from fxpipe.program import Program
    from fxpipe.schedule import Schedule
    from fxpipe.self_conditioning import SelfConditioning

__all__ = [
    "CaptureError",
    "Cluster",
    "CompileError",
    "FxpipeError",
    "Program",
    "RunError",
    "Schedule",
    "ScheduleError",
    "SelfConditioning",
    "compile",
]

# Loaded on first use: `compile` pulls in torch, the passes and the cost models, and reading a plan should stay light.
_LAZY = {
    "Cluster": "fxpipe.cluster",
    "Program": "fxpipe.program",
    "Schedule": "fxpipe.schedule",
    "SelfConditioning": "fxpipe.self_conditioning",
    "compile": "fxpipe.compiler",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
