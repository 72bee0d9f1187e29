"""Stable Diffusion 2.1's frozen share on a device, against the published one.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --device H100@bfloat16
    python benchmarks/calibration.py --update-golden

Prints seconds of the frozen forward (VAE encoder, text encoder) and of the U-Net's forward and backward, at 512x512,
and their ratio beside DiffusionPipe's on an A100-80GB (Tian et al., MLSys 2024), mixed precision. The golden file holds
the costs of all operations, so that a test can hold the ratio without capturing the model.
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from compile_sd21 import StableDiffusion21Step
from rich.console import Console
from rich.table import Table

from cost_models.devices import device
from cost_models.flops import node_costs
from cost_models.roofline import Roofline
from fxpipe.capture import capture
from fxpipe.capture.inputs import describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.costs import NodeCost
from fxpipe.costs.model import node_seconds
from fxpipe.costs.table import CostTable
from passes.blocks import analyse

PUBLISHED = {8: 0.38, 16: 0.41, 32: 0.43, 64: 0.44}
GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "sd21_costs.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="A100-80GB@bfloat16")
    parser.add_argument("--update-golden", action="store_true")
    options = parser.parse_args()
    frozen, trainable = captured_costs()
    if options.update_golden:
        GOLDEN.write_text(as_json({"frozen": frozen, "trainable": trainable}))
    Console().print(table(frozen, trainable, device(options.device)))


def captured_costs() -> tuple[list[NodeCost], list[NodeCost]]:
    """Costs of the frozen operations and of the others."""
    with torch.device("meta"):
        step = StableDiffusion21Step()
    captured = capture(ModelCall(step, *describe(step, (), step.example_inputs(8), None)))
    costs = {node.name: cost for node, cost in node_costs(captured.graph.nodes).items()}
    graph = analyse(captured, dict.fromkeys(costs, 1.0), 24)
    names = {name for component in graph.components for name in component.nodes}
    parts = ([cost for name, cost in costs.items() if (name in names) == inside] for inside in (True, False))
    frozen, trainable = parts
    return frozen, trainable


def table(frozen: list[NodeCost], trainable: list[NodeCost], model: Roofline) -> Table:
    table = Table("batch", "frozen, ms", "trainable, ms", "share", "published")
    parts = CostTable.of(frozen), CostTable.of(trainable)
    for size, published in PUBLISHED.items():
        of_frozen, of_trainable = (node_seconds(model, part, size) for part in parts)
        first, second = of_frozen.forward.sum(), of_trainable.both.sum()
        cells = (f"{first * 1e3:.0f}", f"{second * 1e3:.0f}", f"{first / second:.1%}", f"{published:.0%}")
        table.add_row(str(size), *cells)
    return table


def as_json(parts: dict[str, list[NodeCost]]) -> str:
    """A line per distinct cost of each part, with how many operations have it."""
    rows: list[dict[str, Any]] = []
    for part, costs in parts.items():
        for cost, count in Counter(cost for cost in costs if cost != NodeCost()).items():
            fields = {name: str(value) for name, value in asdict(cost).items() if value not in (0, None)}
            rows.append({"part": part, "count": count, **fields})
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    main()
