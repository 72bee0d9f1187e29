"""fxpipe compiles diffusion models for several devices.

    fxpipe.compile(model, world_size=8)           ->   capture  ->  blocks, costs  ->  plan  ->  one program per rank
    fxpipe.compile_sampler(pipe, world_size=4)    ->   capture  ->  rows  ->  patches        ->  one program per rank

compiler       the whole story, a line per step: analysis (the front half), then plan, then program
sample_compiler, sampling           the same story for a denoiser as it samples; what it does for every kind of call
options, errors                     what users give, and what they are told
models, capture                     their step as one graph
plan                                the language: blocks, stages, schedules, plans, rank programs, and their checks
cluster, costs, simulate            machines, what work costs on them, and what a step takes
run                                 transports, engines, training, checkpoints; profiling times blocks on a device
show, cli                           dumps, reports, traces; commands
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.errors import CaptureError, CompileError, FxpipeError, RunError, ScheduleError, Stopped

if TYPE_CHECKING:
    from fxpipe.cluster import Cluster
    from fxpipe.compiler import compile
    from fxpipe.costs.model import CostModel, NodeSeconds
    from fxpipe.models.pipeline_steps import tokenize, training_step
    from fxpipe.models.pipeline_steps.step import PipelineStep
    from fxpipe.models.self_conditioning import SelfConditioning
    from fxpipe.plan.plan import Plan
    from fxpipe.plan.schedule import Schedule
    from fxpipe.program import Program
    from fxpipe.run.local_batch import LocalBatch
    from fxpipe.run.saves.choice import Loaded, load_checkpoint
    from fxpipe.run.saves.folders import checkpoints
    from fxpipe.sample_compiler import compile_sampler
    from fxpipe.sampler import Sampler

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "CompileError",
    "CostModel",
    "FxpipeError",
    "Loaded",
    "LocalBatch",
    "NodeSeconds",
    "PipelineStep",
    "Plan",
    "Program",
    "RunError",
    "Sampler",
    "Schedule",
    "ScheduleError",
    "SelfConditioning",
    "Stopped",
    "checkpoints",
    "compile",
    "compile_sampler",
    "load_checkpoint",
    "tokenize",
    "training_step",
]

# Loaded on first use: `compile` pulls in torch, the passes and the cost models, and reading a plan should stay light.
_LAZY = {
    "Cluster": "fxpipe.cluster",
    "CostModel": "fxpipe.costs.model",
    "Loaded": "fxpipe.run.saves.choice",
    "LocalBatch": "fxpipe.run.local_batch",
    "NodeSeconds": "fxpipe.costs.model",
    "PipelineStep": "fxpipe.models.pipeline_steps.step",
    "Plan": "fxpipe.plan.plan",
    "Program": "fxpipe.program",
    "Schedule": "fxpipe.plan.schedule",
    "SelfConditioning": "fxpipe.models.self_conditioning",
    "Sampler": "fxpipe.sampler",
    "checkpoints": "fxpipe.run.saves.folders",
    "compile": "fxpipe.compiler",
    "compile_sampler": "fxpipe.sample_compiler",
    "load_checkpoint": "fxpipe.run.saves.choice",
    "tokenize": "fxpipe.models.pipeline_steps",
    "training_step": "fxpipe.models.pipeline_steps",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
