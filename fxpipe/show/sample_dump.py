"""Write a sampler's programs as files that people read and diff."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.plan.sample_program import SampleProgram
from fxpipe.show.source import method, own_name

if TYPE_CHECKING:
    from fxpipe.sampler import Sampler

_HEADER = '''"""Rank {rank}: one call of the denoiser, in each of its forms.

Written by fxpipe to be read and compared; what runs is the FX graphs this was printed from. Inputs are whole, and so is
what is returned; between, values are those of this rank's samples and rows. `k_from_1` is what patch 1 has of k. What a
form `carries` to the next step is in a dict beside its prediction, and `carried` there.
"""

import torch
{imports}
aten = torch.ops.aten


class Rank{rank}(torch.nn.Module):
'''


def dump(sampler: "Sampler", directory: Path) -> Path:
    """sampler.txt, plan.txt, plan.json, rows.txt, traffic.txt, traffic.json, and rank_<r>.py with all forms."""
    traffic = sampler.traffic()
    table = [
        {"source": src, "target": dst, "kind": kind, "bytes": size}
        for (src, dst), kinds in traffic.by_channel_and_kind().items()
        for kind, size in kinds.items()
    ]
    texts = {
        "sampler.txt": str(sampler),
        "plan.txt": str(sampler.plan),
        "plan.json": json.dumps(sampler.plan.as_dict(), indent=1),
        "rows.txt": sampler.step.about,
        "traffic.txt": "\n\n".join(f"{form}\n{sampler.traffic(form)}" for form in sampler.step.forms),
        "traffic.json": json.dumps(table, indent=1),
        **{f"rank_{program.rank}.py": rank_text(program) for program in sampler.step.whole.programs},
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text.rstrip() + "\n")
    return directory


def rank_text(program: SampleProgram) -> str:
    """One rank's program as methods of a class that holds the model's tensors."""
    graphs = {"once": program.once} if program.once is not None else {}
    graphs |= {name: form.graph for name, form in program.forms.items()}
    methods = (method(name, graph, {}) for name, graph in graphs.items())
    body = "\n\n".join(textwrap.indent(text, "    ") for text in methods)
    used: dict[str, set[str]] = {}
    for node in (node for graph in graphs.values() for node in graph.nodes):
        if (name := own_name(node)) is not None:
            used.setdefault(node.target.__module__, set()).add(name)
    imports = "".join(f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(used.items()))
    return _HEADER.format(rank=program.rank, imports=imports) + body
