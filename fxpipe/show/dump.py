"""Write programs as files that people read and diff: a training step's, or a sampler's."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from fxpipe.plan.rank_program import RankProgram, Traffic
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.step import StepPlan
from fxpipe.show.source import method, own_name

if TYPE_CHECKING:
    from fxpipe.program import Program
    from fxpipe.sampler import Sampler

_TRAINS = """one training step (`forward`), then the stage graphs it calls.

Written by fxpipe to be read and compared; what runs is the FX graph this was printed from. A paragraph is one action of
the schedule: its receives are posted some actions ahead, `wait` is where it may have to wait. `_mb2` marks a value of
micro-batch 2; `saved` goes from a stage's forward to its backward.
"""
_SAMPLES = """one call of the denoiser, in each of its forms.

Written by fxpipe to be read and compared; what runs is the FX graphs this was printed from. Inputs are whole, and so is
what is returned; between, values are those of this rank's samples and rows. `k_from_1` is what patch 1 has of k. What a
form `carries` to the next step is in a dict beside its prediction, and `carried` there.
"""
_FILE = '''"""Rank {rank}: {about}"""

{python}import torch
{own}
aten = torch.ops.aten


class Rank{rank}(torch.nn.Module):
{body}'''


def dump(program: "Program", directory: Path, filled: bool = False) -> Path:
    """plan.txt, plan.json, blocks.txt, schedule.txt, schedule.json, traffic.txt, traffic.json and rank_<r>.py, and
    updates.py where forward writes into the model.

    With `filled` also fill.txt, and folders prologue, steady and epilogue with their traffic.txt and rank_<r>.py.
    """
    schedule = program.schedule
    order = {
        "name": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "ranks": [[str(action) for action in actions] for actions in schedule.ranks],
    }
    texts = {
        "plan.txt": str(program.plan),
        "blocks.txt": str(program.blocks),
        "schedule.txt": program.schedule.text(),
        "grid.txt": str(program.schedule),
        "traffic.txt": str(program.traffic()),
        "plan.json": json.dumps(program.plan.as_dict(), indent=1),
        "schedule.json": json.dumps(order, indent=1),
        "traffic.json": _traffic(program.traffic()),
    }
    _write(directory, texts | _ranks(program.step) | _updates(program.step))
    if filled and program.filled is not None:
        assert program.plan.steady is not None
        _write(directory, {"fill.txt": program.plan.steady.text()})
        for name in ("prologue", "steady", "epilogue"):
            form: StepPlan = getattr(program.filled, name)
            _write(directory / name, {"traffic.txt": str(Traffic(form.messages)), **_ranks(form)})
    return directory


def dump_sampler(sampler: "Sampler", directory: Path) -> Path:
    """sampler.txt, plan.txt, plan.json, rows.txt, traffic.txt, traffic.json, and rank_<r>.py with all forms."""
    texts = {
        "sampler.txt": str(sampler),
        "plan.txt": str(sampler.plan),
        "plan.json": json.dumps(sampler.plan.as_dict(), indent=1),
        "rows.txt": sampler.step.about,
        "traffic.txt": "\n\n".join(f"{form}\n{sampler.traffic(form)}" for form in sampler.step.forms),
        "traffic.json": _traffic(sampler.traffic()),
        **{f"rank_{program.rank}.py": _sampling_text(program) for program in sampler.step.whole.programs},
    }
    _write(directory, texts)
    return directory


def _traffic(traffic: Traffic) -> str:
    table = [
        {"source": src, "target": dst, "kind": kind, "bytes": size}
        for (src, dst), kinds in traffic.by_channel_and_kind().items()
        for kind, size in kinds.items()
    ]
    return json.dumps(table, indent=1)


def _write(directory: Path, texts: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text.rstrip() + "\n")


def _ranks(step: StepPlan) -> dict[str, str]:
    return {f"rank_{program.rank}.py": rank_text(program) for program in step.programs}


def _updates(step: StepPlan) -> dict[str, str]:
    """What is written into the model's own tensors, a function for each, named after it in a comment."""
    texts = [
        f"# {update.name}, {'before' if update.is_first else 'after'} every step\n"
        + method(f"update_{number}", update.graph, {})
        for number, update in enumerate(step.updates)
    ]
    head = '"""What forward writes into the model, once in a step; `self` is the model."""\n\nimport torch\n\n'
    return {"updates.py": head + "aten = torch.ops.aten\n\n\n" + "\n\n\n".join(texts)} if texts else {}


def rank_text(program: RankProgram) -> str:
    """One rank's program and the stage graphs it calls, as the methods of a class that holds the model's parameters."""
    return _class(program.rank, _TRAINS, {"forward": program.graph, **program.modules})


def _sampling_text(program: SampleProgram) -> str:
    """One rank's program as methods of a class that holds the model's tensors."""
    once = {"once": program.once} if program.once is not None else {}
    return _class(program.rank, _SAMPLES, once | {name: form.graph for name, form in program.forms.items()})


def _class(rank: int, about: str, graphs: Mapping[str, fx.Graph]) -> str:
    """A file with all that its methods name."""
    body = "\n\n".join(textwrap.indent(method(name, graph, graphs), "    ") for name, graph in graphs.items())
    used: dict[str, set[str]] = {}
    for node in (node for graph in graphs.values() for node in graph.nodes):
        if (name := own_name(node)) is not None:
            used.setdefault(node.target.__module__, set()).add(name)
    own = "".join(f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(used.items()))
    return _FILE.format(
        rank=rank, about=about, python="import operator\n\n" * (" operator." in body), own=own, body=body
    )
