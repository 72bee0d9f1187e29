"""Replicas and places of pipelines as a torch `DeviceMesh`, for what users compute over ranks between steps.

pipelines (0, 1), (2, 3)     mesh      pipeline 0   1
                             data 0             0   1
                             data 1             2   3
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

NAMES = ("data", "pipeline")


def device_mesh(pipelines: Sequence[Sequence[int]], rank: int, device: torch.device) -> DeviceMesh:
    """Collective: a mesh of equal pipelines, with process groups of its own."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    mine: list[dist.ProcessGroup] = []
    for groups in (zip(*pipelines, strict=True), pipelines):  # the ranks of a place; those of a pipeline
        for ranks in groups:
            group = dist.new_group(list(ranks), backend=backend)  # collective over all ranks
            if rank in ranks:
                mine.append(group)
    return DeviceMesh.from_group(mine, device.type, torch.tensor(pipelines, dtype=torch.int), mesh_dim_names=NAMES)
