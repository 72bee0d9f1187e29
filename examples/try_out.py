"""What every example does with its model: show the plan, hold one step against one device, train a few steps."""

import os
from typing import Any

import torch
from torch import nn

import fxpipe


def try_out(model: nn.Module, world_size: int, schedule: str = "auto", num_steps: int = 3) -> None:
    """All ranks in this process; under torchrun this process is one of its ranks, and `world_size` is torchrun's."""
    launched = "WORLD_SIZE" in os.environ
    torch.set_num_threads(1)
    program = fxpipe.compile(model, int(os.environ.get("WORLD_SIZE", world_size)), schedule=schedule)
    step: Any = program.model  # the model; a bare backbone's step is made by fxpipe
    batch = step.example_inputs(program.step.batch_size)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        skips = sum(kind == "skip" for edge in program.blocks.edges for kind in edge.kinds)
        print(program.plan.summary(), program.schedule, sep="\n\n")
        print(f"\n{skips} skips, {program.traffic().kinds['skip']:,} bytes of them sent between ranks")
    if not launched:
        print(program.verify(**batch))

    engine = program.engine() if launched else program.local_engine()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index in range(num_steps):
        loss = engine.step(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {index + 1}  loss {float(loss):.6f}")
    engine.close()
