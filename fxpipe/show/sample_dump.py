"""Write a sampler's programs as files that people read and diff."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.plan.sample_program import SampleProgram
from fxpipe.show.source import method, own_name

if TYPE_CHECKING:
    from fxpipe.sampler import Sampler

_HEADER = '''"""Rank {rank}: one call of the denoiser.

Written by fxpipe to be read and compared; what runs is the FX graph this was printed from. Inputs are whole, and so is
what is returned; between, values are those of this rank's samples and rows. `k_from_1` is what patch 1 has of k.
"""

import torch
{imports}
aten = torch.ops.aten


class Rank{rank}(torch.nn.Module):
'''


def dump(sampler: "Sampler", directory: Path) -> Path:
    """plan.txt, rows.txt, traffic.txt, traffic.json, rank_<r>.py, and of other forms than fresh rank_<r>_<form>.py."""
    traffic = sampler.traffic()
    table = [
        {"source": src, "target": dst, "kind": kind, "bytes": size}
        for (src, dst), kinds in traffic.by_channel_and_kind().items()
        for kind, size in kinds.items()
    ]
    texts = {
        "plan.txt": str(sampler),
        "rows.txt": sampler.step.about,
        "traffic.txt": str(traffic),
        "traffic.json": json.dumps(table, indent=1),
        **{
            f"rank_{program.rank}{'' if form == 'fresh' else '_' + form}.py": rank_text(program, form)
            for program in sampler.step.programs
            for form in program.forms
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text.rstrip() + "\n")
    return directory


def rank_text(program: SampleProgram, form: str = "fresh") -> str:
    """One form of a rank's program as the method of a class that holds the model's tensors."""
    graph = program.forms[form].graph
    body = textwrap.indent(method("forward", graph, {}), "    ")
    used: dict[str, set[str]] = {}
    for node in graph.nodes:
        if (name := own_name(node)) is not None:
            used.setdefault(node.target.__module__, set()).add(name)
    imports = "".join(f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(used.items()))
    return _HEADER.format(rank=program.rank, imports=imports) + body
