"""Write a program as files that people read and diff."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxpipe.rank_program import RankProgram

if TYPE_CHECKING:
    from fxpipe.program import Program

_HEADER = "# Rank {rank}: a step is `forward(transport, random, inputs...)`; stage graphs follow, in order of first use.\n"


def dump(program: "Program", directory: Path) -> Path:
    """plan.txt, plan.json, blocks.txt, schedule.txt, schedule.json, traffic.txt, traffic.json and rank_<r>.py."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "plan.txt": str(program.plan),
        "blocks.txt": str(program.plan.blocks),
        "schedule.txt": program.schedule.text(),
        "grid.txt": str(program.schedule),
        "traffic.txt": str(program.traffic()),
        "plan.json": json.dumps(program.plan.as_dict(), indent=1),
        "schedule.json": json.dumps(_schedule(program), indent=1),
        "traffic.json": json.dumps(_traffic(program), indent=1),
    }
    texts |= {f"rank_{p.rank}.py": rank_text(p) for p in program.step.programs}
    for name, text in texts.items():
        (directory / name).write_text(text.rstrip() + "\n")
    return directory


def _schedule(program: "Program") -> dict[str, Any]:
    schedule = program.schedule
    return {
        "name": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "ranks": [[str(action) for action in actions] for actions in schedule.ranks],
    }


def _traffic(program: "Program") -> list[dict[str, Any]]:
    rows = program.traffic().by_channel_and_kind()
    return [
        {"source": src, "target": dst, "kind": kind, "bytes": size}
        for (src, dst), kinds in rows.items()
        for kind, size in kinds.items()
    ]


def rank_text(program: RankProgram) -> str:
    """One rank's program and its stage graphs as Python, with shapes as annotations and messages as comments."""
    parts = [_HEADER.format(rank=program.rank), _code(program.graph, f"rank_{program.rank}")]
    parts += [_code(graph, name) for name, graph in program.modules.items()]
    return "\n\n".join(parts)


def _code(graph: fx.Graph, name: str) -> str:
    code = graph.python_code("self", verbose=False).src.strip()
    lines = [line for line in code.splitlines() if line.strip()]
    comments = {node.name: _comment(node) for node in graph.nodes}
    text = []
    for line in lines:
        assigned = line.strip().split(" ", 1)[0]
        comment = comments.get(assigned)
        bare = line.split(";  ")[0]
        text.append(f"{bare}  # {comment}" if comment else bare)
    return f"class {name}:\n" + "\n".join(f"    {line}" for line in text)


def _comment(node: fx.Node) -> str:
    message = node.meta.get("message")
    if message is not None:
        return f"{message}, {message.num_bytes:,} bytes"
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return ""
