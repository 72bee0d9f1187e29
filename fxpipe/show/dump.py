"""Write a program as files that people read and diff."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.plan.rank_program import RankProgram, Traffic
from fxpipe.plan.step import StepPlan
from fxpipe.show.source import method, own_name

if TYPE_CHECKING:
    from fxpipe.program import Program

_HEADER = '''"""Rank {rank}: one training step (`forward`), then the stage graphs it calls.

Written by fxpipe to be read and compared; what runs is the FX graph this was printed from. A paragraph is one action of
the schedule: its receives are posted some actions ahead, `wait` is where it may have to wait. `_mb2` marks a value of
micro-batch 2; `saved` goes from a stage's forward to its backward.
"""

{imports}import torch
from fxpipe.plan.ops import {used}

aten = torch.ops.aten


class Rank{rank}(torch.nn.Module):
'''


def dump(program: "Program", directory: Path, filled: bool = False) -> Path:
    """plan.txt, plan.json, blocks.txt, schedule.txt, schedule.json, traffic.txt, traffic.json and rank_<r>.py.

    With `filled` also fill.txt, and folders prologue, steady and epilogue with their traffic.txt and rank_<r>.py.
    """
    schedule = program.schedule
    traffic = [
        {"source": src, "target": dst, "kind": kind, "bytes": size}
        for (src, dst), kinds in program.traffic().by_channel_and_kind().items()
        for kind, size in kinds.items()
    ]
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
        "traffic.json": json.dumps(traffic, indent=1),
    }
    _write(directory, texts | _ranks(program.step))
    if filled and program.filled is not None:
        assert program.plan.steady is not None
        _write(directory, {"fill.txt": program.plan.steady.text()})
        for name in ("prologue", "steady", "epilogue"):
            form: StepPlan = getattr(program.filled, name)
            _write(directory / name, {"traffic.txt": str(Traffic(form.messages)), **_ranks(form)})
    return directory


def _ranks(step: StepPlan) -> dict[str, str]:
    return {f"rank_{program.rank}.py": rank_text(program) for program in step.programs}


def _write(directory: Path, texts: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text.rstrip() + "\n")


def rank_text(program: RankProgram) -> str:
    """One rank's program and the stage graphs it calls, as the methods of a class that holds the model's parameters."""
    graphs = [program.graph, *program.modules.values()]
    used = sorted({name for graph in graphs for node in graph.nodes if (name := own_name(node))})
    methods = [method("forward", program.graph, program.modules)]
    methods += [method(name, graph, {}) for name, graph in program.modules.items()]
    body = "\n\n".join(textwrap.indent(text, "    ") for text in methods)
    imports = "import operator\n\n" if " operator." in body else ""
    return _HEADER.format(rank=program.rank, imports=imports, used=", ".join(used)) + body
