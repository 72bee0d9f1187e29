"""Which rank has which samples and which rows of the image when a denoiser is spread over ranks.

2 groups of samples x 3 patches        rank 0: samples 0:1, patch 0    rank 3: samples 1:2, patch 0
                                       rank 1: samples 0:1, patch 1    rank 4: samples 1:2, patch 1
                                       rank 2: samples 0:1, patch 2    rank 5: samples 1:2, patch 2

1 group x 2 stages x 2 patches         rank 0: stage 0, patch 0          rank 2: stage 1, patch 0
                                       rank 1: stage 0, patch 1          rank 3: stage 1, patch 1
"""

from dataclasses import dataclass
from math import gcd

from fxpipe.errors import CompileError
from fxpipe.plan.plan import microbatch_samples, microbatch_sizes


@dataclass(frozen=True)
class Grid:
    """`groups` of samples, of `stages` columns of `patches` each.

    Group g's patch p is on rank g * patches + p; with stages s too, on rank (g * stages + s) * patches + p.
    `turns`: on every rank so many patches follow each other through the stages. `copies`: so many times the same, on
    ranks one after the other, where fewer ranks are faster than all.
    """

    groups: int
    patches: int
    stages: int = 1
    turns: int = 1
    copies: int = 1

    @property
    def world_size(self) -> int:
        return self.copies * self.of_copy

    @property
    def of_copy(self) -> int:
        """Ranks that make one prediction together."""
        return self.groups * self.stages * self.patches

    def rank(self, group: int, column: int, patch: int) -> int:
        return (group * self.stages + column) * self.patches + patch

    def place(self, rank: int) -> tuple[int, int, int]:
        """Group, column and patch."""
        column, patch = divmod(rank, self.patches)
        return *divmod(column, self.stages), patch

    def spans(self, batch_size: int) -> list[tuple[int, int]]:
        """The samples [start, stop) of every group."""
        return microbatch_samples(microbatch_sizes(batch_size, self.groups))


def grid_for(world_size: int, batch_size: int, cfg: int | None, patches: int | None, stages: int | None = None) -> Grid:
    """The grid of a call with so many samples: as many groups as divide both where `cfg` is left open, since groups
    exchange the prediction alone; one stage where `stages` is.

    Raises:
        CompileError: the ranks cannot be used so.
    """
    asked = {"cfg": cfg, "stages": stages, "patches": patches}
    columns = stages or 1
    ranks = world_size // columns  # of one stage
    if cfg is None:
        cfg = gcd(ranks, batch_size) if patches is None else ranks // patches
    if patches is None:
        patches = ranks // max(cfg, 1)
    if cfg < 1 or patches < 1 or cfg * columns * patches != world_size:
        told = " x ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        raise CompileError(f"{told} can't be world_size={world_size} ranks; leave one open, or give other numbers")
    if cfg > batch_size:
        given = " and ".join(name for name in ("cfg", "patches") if asked[name] is not None)
        raise CompileError(
            f"cfg={cfg} groups of samples, but a call has {batch_size}; leave {given} out: every call then has what is "
            f"right for it, this one cfg={gcd(ranks, batch_size)}"
        )
    return Grid(cfg, patches, columns)
