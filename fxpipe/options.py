"""The options of `fxpipe.compile`, checked and completed."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.capture.inputs import call_of
from fxpipe.cluster import Cluster
from fxpipe.costs.held import CheckedCosts
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError
from fxpipe.models.backbones import PredictionStep, is_backbone
from fxpipe.models.pipeline_steps import training_step as pipeline_step
from fxpipe.models.pipelines import is_pipeline
from fxpipe.models.self_conditioning import SelfConditioning
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.plan import Plan
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import SHARDS

PRECISIONS: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of an autocast around forward by name; without one the step computes as the model does by itself."""
FILLS = ("auto", "idle", "after", "none")
"""Where frozen work is done: "idle" for the next batch in idle time, "after" for the next batch when this one's
training has ended, "none" for this batch, as part of its step; "auto" takes the fastest."""

BACKENDS = ("eager", "inductor", "cudagraphs")
"""How stage graphs run."""


def check_counts(**counts: int | None) -> None:
    """Every count must be a positive integer, or None where it is left out."""
    for name, value in counts.items():
        missing = value is None and name != "world_size"
        if not missing and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise CompileError(f"{name} must be a positive integer, got {value!r}")


def check_flags(**flags: bool | None) -> None:
    """Every flag must be True or False, or None where it is left out."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise CompileError(f"{name}={value!r}; give True or False, or leave it out")


def check_others(
    *, observe: Any, recompute: Any, budget: Any, collocation: Any, fill: Any, shard: Any,
    offload_optimizer: Any, shapes: Any, **_: Any,
) -> None:  # fmt: skip
    """The options that are neither counts nor texts: what they must be able to do, before they are first used."""
    if observe is not None and not _takes(observe, "capture", None):
        raise CompileError(f"observe is {_shown(observe)}; give a function of (step's name, its result)")
    if collocation not in (None, "hard", "soft"):
        raise CompileError(f"collocation={collocation!r}; give 'hard' or 'soft', or leave it out")
    if fill not in FILLS:
        raise CompileError(f"fill={fill!r}; give one of {', '.join(map(repr, FILLS))}")
    if shapes not in ("any", "fixed"):
        raise CompileError(f"shapes={shapes!r}; give 'any' or 'fixed', or leave it out")
    if recompute not in (None, "auto", True, False):
        raise CompileError(f"recompute={recompute!r}; give True or False, 'auto', or leave it out")
    if shard not in (None, *SHARDS):
        raise CompileError(f"shard={shard!r}; give one of {', '.join(map(repr, SHARDS))}, or leave it out")
    check_flags(offload_optimizer=offload_optimizer)
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0:
        raise CompileError(f"budget={budget!r} is no number of seconds; give one, 0 for no search")


def check_backend(backend: Any, device: torch.device) -> None:
    """One that is known, and can run there."""
    if backend not in BACKENDS:
        raise CompileError(f"backend={backend!r}; give one of {', '.join(map(repr, BACKENDS))}, or leave it out")
    if backend == "cudagraphs" and device.type != "cuda":
        raise CompileError(f"backend='cudagraphs' is for GPUs, the ranks run on {device}; move the model there first")


def held_cost_model(given: Any, or_text: str = "") -> CostModel:
    """One that has what `CostModel` asks for; what its seconds are is seen when it is asked for them.

    `or_text` says what else may be given, for the message.
    """
    lacks = [name for name, arguments in _COST_MODEL.items() if not _takes(getattr(given, name, None), *arguments)]
    if isinstance(given, type) or lacks:
        without = "" if isinstance(given, type) else f" without {', '.join(lacks)}"
        raise CompileError(
            f"cost_model is {_shown(given)}{without}; give {or_text}an object of a class that inherits from "
            "fxpipe.CostModel and has a method seconds(table, num_samples)"
        )
    memory = getattr(given, "memory_bytes", _MISSING)
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 1):
        shown = "missing" if memory is _MISSING else repr(memory)
        raise CompileError(
            f"memory_bytes of cost_model {type(given).__name__} is {shown}; give a positive integer, or None where the "
            "memory is not known"
        )
    return given if isinstance(given, CheckedCosts) else CheckedCosts(given)


_COST_MODEL: dict[str, tuple[Any, ...]] = {"seconds": (None, 1), "moving_seconds": (1, 1), "drawing_seconds": ("", 1)}
_MISSING = object()


def _takes(function: Any, *arguments: Any) -> bool:
    """Whether it can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}, a {type(value).__name__}"


def given_precision(precision: str | None) -> torch.dtype | None:
    """The type of an autocast around forward, None where there is to be none."""
    if precision is not None and precision not in PRECISIONS:
        raise CompileError(f"precision={precision!r}; give one of {', '.join(map(repr, PRECISIONS))}, or leave it out")
    return None if precision is None else PRECISIONS[precision]


def given_device(device: str | torch.device) -> torch.device:
    """The device that ranks run on; stage graphs are traced for it, so it must be here: of GPUs, a launch's own one."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CompileError(f"device {device!r} is no torch device: {str(error).splitlines()[0]}") from None
    if found.type not in ("cpu", "cuda"):
        raise CompileError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise CompileError(f"device {device!r} needs a CUDA build of torch and a visible GPU; use device='cpu'")
    if found.type == "cuda" and found.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return found


def given_cluster(cluster: Cluster | str | None, world_size: int) -> Cluster:
    """A cluster of at least `world_size` devices; one node of A100-80GB where left out."""
    if isinstance(cluster, Cluster):
        return cluster.require(world_size)
    return Cluster.parse(f"{world_size}xA100-80GB" if cluster is None else cluster).require(world_size)


def given_schedule(schedule: str | Schedule, world_size: int) -> str | Schedule:
    """A schedule's name as it is; a schedule or its text as a `Schedule` for `world_size` ranks."""
    if not isinstance(schedule, str | Schedule):
        raise CompileError(f"schedule must be a name, a schedule's text or a Schedule, got {type(schedule).__name__}")
    if isinstance(schedule, str) and "rank " not in schedule:
        if not schedule.strip():
            raise CompileError(
                "the schedule is empty; give a name such as '1f1b', or a line 'rank 0: 0F0 0B0' per rank"
            )
        if actions := re.search(r"\b\d+[A-Z]\d+\b", schedule):
            raise CompileError(
                f"the schedule has actions ({actions[0]}) but no ranks; begin each line with its rank, as in "
                f"'rank 0: {' '.join(schedule.split()[:4])}'"
            )
        return schedule
    parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    if len(parsed.ranks) != world_size:
        raise CompileError(f"the schedule has {len(parsed.ranks)} ranks, world_size is {world_size}")
    return parsed


def given_plan(plan: Plan | str | Path | None, world_size: int, limit_bytes: int | None, **asked: Any) -> Plan | None:
    """A plan, or the one in a file; what is `asked` for beside it must be what it says.

    Raises:
        CompileError: it is for another number of ranks, needs more than the limit, or says something else.
    """
    if plan is None:
        return None
    if not isinstance(plan, Plan | str | Path):
        raise CompileError(f"plan is {_shown(plan)}; give a Plan, or the path of a saved one")
    known = plan if isinstance(plan, Plan) else Plan.load(plan)
    if known.staged.world_size != world_size:
        raise CompileError(
            f"the plan is for {known.staged.world_size} ranks, world_size is {world_size}; use as many ranks, or make "
            f"a plan for {world_size} (fxpipe tune --save)"
        )
    says = {
        "batch_size": known.batch_size, "microbatches": known.num_microbatches, "stages": known.staged.num_stages,
        "data_parallel": known.staged.replicas, "shard": known.staged.shard,
        "offload_optimizer": known.staged.offloaded,
    }  # fmt: skip
    for name, value in asked.items():
        if value in (None, "auto") or value == says.get(name):
            continue
        told = f"says {name}={says[name]}" if name in says else "has chosen that"
        raise CompileError(f"{name}={value!r} beside a plan, which {told}; leave {name} out, or make another plan")
    require_within(known, limit_bytes)
    return known


def require_within(plan: Plan, limit_bytes: int | None) -> None:
    """Refuse a plan that needs more memory than there may be."""
    if limit_bytes is not None and plan.peak_bytes is not None and plan.peak_bytes > limit_bytes:
        raise CompileError(
            f"the plan needs {human_bytes(plan.peak_bytes)} a rank, memory_limit is {human_bytes(limit_bytes)}; give "
            "a higher limit, or make a plan within it (fxpipe tune --memory-limit --save)"
        )


def given_sample_plan(plan: SamplePlan | str | Path | None, world_size: int, **asked: object) -> SamplePlan | None:
    """A sampler's plan, or the one in a file; what is `asked` for beside it must be what it says.

    Raises:
        CompileError: it is for another number of ranks, or says something else.
    """
    if plan is None:
        return None
    if not isinstance(plan, SamplePlan | str | Path):
        raise CompileError(f"plan is {_shown(plan)}; give a SamplePlan, or the path of a saved one")
    known = plan if isinstance(plan, SamplePlan) else SamplePlan.load(plan)
    if known.world_size != world_size:
        raise CompileError(
            f"the plan is for {known.world_size} ranks, world_size is {world_size}; use as many ranks, or leave the "
            "plan out"
        )
    grid = known.grid
    says = {
        "cfg": (grid.groups,), "stages": (grid.stages,), "fold": (known.staged.num_stages > grid.stages,),
        "patches": (known.num_patches, known.bounds),
    }  # fmt: skip
    for name, value in asked.items():
        given = tuple(value) if isinstance(value, Sequence) else value
        if given is not None and given not in says[name]:
            raise CompileError(
                f"{name}={value!r} beside a plan, which says {name}={says[name][0]}; leave {name} out, or the plan"
            )
    return known


def check_patches(patches: object) -> None:
    """A count, or bounds from 0 on, each larger than the one before."""
    if not isinstance(patches, Sequence) or isinstance(patches, str):
        check_counts(patches=patches)  # type: ignore[arg-type]
        return
    whole = all(type(bound) is int for bound in patches)
    if not whole or len(patches) < 2 or patches[0] != 0 or sorted(set(patches)) != list(patches):
        raise CompileError(
            f"patches={list(patches)} are no bounds: integers from 0 to the number of units, each larger; or give a "
            "count of patches"
        )


def given_bytes(value: int | str | None) -> int | None:
    """A number of bytes, or a text with a unit: "40GiB", "80 GB"."""
    if value is None:
        return None
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", value) if isinstance(value, str) else None
    try:
        scale = (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ") if found else 1
        number = float(found[1]) * scale if found else value
        if isinstance(number, int | float) and not isinstance(number, bool) and 1 <= number < float("inf"):
            return int(number)
    except ValueError:
        pass
    raise CompileError(f"memory_limit={value!r} is no number of bytes; give one, or a text such as '40GiB'")


def asked_microbatches(
    microbatches: int | None, batch_size: int, world_size: int, schedule: str | Schedule, multiple: int = 1
) -> int | None:
    """The number of micro-batches where the options fix it; None where it is to be chosen.

    With a named schedule and no number: the largest divisor of the batch up to twice the ranks; twice the ranks,
    uneven, where no divisor keeps the ranks busy. What is chosen is a `multiple`, where the batch has as many samples.
    """
    if isinstance(schedule, Schedule):
        if microbatches not in (None, schedule.num_microbatches):
            raise CompileError(f"microbatches={microbatches}, but the schedule has {schedule.num_microbatches}")
        microbatches = schedule.num_microbatches
    elif microbatches is None and schedule != "auto":
        most = min(batch_size, 2 * world_size)
        counts = range(multiple, most + 1, multiple) or range(1, most + 1)
        divisor = max((m for m in counts if batch_size % m == 0), default=0)
        microbatches = divisor if 2 * divisor >= counts[-1] else counts[-1]
    if microbatches is not None and microbatches > batch_size:
        raise CompileError(
            f"microbatches={microbatches} exceeds the batch of {batch_size}; a micro-batch needs a sample"
        )
    return microbatches


def unwrapped(model: Any, schedule: str | Schedule) -> tuple[nn.Module, float | None]:
    """The step, of a pipeline its training step, and the probability of its first pass where that is
    self-conditioning."""
    if is_pipeline(model):
        return pipeline_step(model), None
    if not isinstance(model, SelfConditioning):
        return model, None
    if isinstance(schedule, Schedule):
        raise CompileError("a schedule of your own cannot leave out a self-conditioned first pass; use schedule='auto'")
    return model.step, model.probability


def training_step(
    model: nn.Module, example_inputs: Any, batch_size: int | None, world_size: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module whose forward returns the loss, and one example call of it."""
    if not isinstance(model, nn.Module):
        raise CompileError(f"model must be an nn.Module whose forward returns the loss, got {type(model).__name__}")
    step = PredictionStep(model) if is_backbone(model) else model
    if example_inputs is None:
        if not callable(getattr(step, "example_inputs", None)):
            raise CompileError(
                f"{type(model).__name__} has no method example_inputs(batch_size); pass example_inputs=, "
                "a tuple of positional or a dict of keyword arguments of its forward"
            )
        return step, *call_of(step.example_inputs(batch_size or 2 * world_size))  # type: ignore[operator]
    if isinstance(step, PredictionStep) and isinstance(example_inputs, Mapping) and "target" not in example_inputs:
        raise CompileError(
            f"example_inputs of a backbone need a 'target' beside {sorted(example_inputs)}: the loss is mse against it"
        )
    if not isinstance(example_inputs, torch.Tensor | tuple | list | Mapping) and not is_dataclass(example_inputs):
        raise CompileError(
            f"example_inputs is {_shown(example_inputs)}; give one batch: a tensor, a tuple of positional or a dict of "
            "keyword arguments of forward"
        )
    args, kwargs = call_of(example_inputs)
    if isinstance(step, PredictionStep) and args:
        names = [*inspect.signature(model.forward).parameters]
        raise CompileError(f"example_inputs of a backbone must be a dict with 'target' and arguments among {names}")
    return step, args, kwargs
