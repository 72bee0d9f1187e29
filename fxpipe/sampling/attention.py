"""Which kind of exchange each layer of attention gets: as asked, or the one that takes the least time by estimate.

    layer      gather    ulysses    ring
    attn 1     1.9 ms    1.1 ms     1.6 ms       -> ulysses
    attn 2     0.2 ms    3 heads    0.4 ms       -> gather: 4 patches cannot share 3 heads

A layer's messages go right before it, so its time is that of its own graph, at the speed of every rank. Where patches
are not alike a ring also hides what one waits for another, which only a whole step shows: a kind that is nearly as fast
is tried for all layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from torch import fx

from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import IN_TURN, AttentionKind
from fxpipe.sampling.beside import at_speed
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.clocks import together
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.links import Links
from fxpipe.sampling.planning import Choices, patch_speeds, seen_patches
from passes.rows import RowPlan
from passes.sampling.attention import alike, layers, why_not
from passes.sampling.patches import Patch, patches_of

Attention = Literal["auto", "gather", "ulysses", "ring"]
_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
_GATHER: AttentionKind = "gather"
_NEARLY = 1.25


def with_attention(
    case: SampleCase, made: Choices, asked: Attention, cluster: Cluster | None, speeds: Sequence[float] = ()
) -> Choices:
    """These choices with the kind of every layer; where `asked` leaves it open and there is no cluster, all gather."""
    beside = made.grid.patches > 1 and made.order != IN_TURN
    if not beside or made.how.mode != "exact":
        told = asked in ("ulysses", "ring") and beside
        why = f"attention='{asked}' is for exact steps: displaced ones gather keys and values, and so do those before"
        return replace(made, notes=(*made.notes, why)) if told else made
    plan, patches = _patches(case, made)
    nodes = layers(plan)
    if asked == "auto":
        if cluster is None or not nodes:
            return replace(made, attention=tuple(_GATHER for _ in nodes))
        ways = [replace(made, attention=kinds) for kinds in _fastest(case, made, cluster, speeds)]
        return min(ways, key=lambda way: estimate(case, way, cluster, 1, speeds).seconds) if len(ways) > 1 else ways[0]
    refused = {node: reason for node in nodes if (reason := why_not(plan, node, asked, patches))}
    kinds = tuple(_GATHER if node in refused else asked for node in nodes)
    return replace(made, attention=kinds, notes=(*made.notes, *_notes(refused)))


def require_attention(case: SampleCase, made: Choices) -> None:
    """Refuse kinds that the layers cannot be of."""
    if not made.attention:
        return
    plan, patches = _patches(case, made)
    nodes = layers(plan)
    if len(nodes) != len(made.attention):
        raise CompileError(
            f"the plan has kinds of {len(made.attention)} layers of attention, the call has {len(nodes)}"
        )
    for node, kind in zip(nodes, made.attention, strict=True):
        if why := why_not(plan, node, kind, patches):
            raise CompileError(f"the plan says {kind} for the attention {node.name}, but {why}")


def _patches(case: SampleCase, made: Choices) -> tuple[RowPlan, list[Patch]]:
    plan = case.rows(_size(case, made))
    return plan, patches_of(plan, made.bounds, "first" if made.text_first else "all")


def _size(case: SampleCase, made: Choices) -> int:
    """Samples that pass together."""
    return case.run_size(made.grid) if made.spans else case.group_size(made.grid)


def _fastest(
    case: SampleCase, made: Choices, cluster: Cluster, speeds: Sequence[float]
) -> list[tuple[AttentionKind, ...]]:
    """The fastest of every layer by itself; then one of all that can be of it, where that is nearly as fast."""
    speeds = patch_speeds(speeds, made.grid)
    plan, patches = _patches(case, made)
    links, known = case.links(cluster, made.grid), dict[object, dict[AttentionKind, float]]()
    taken: list[dict[AttentionKind, float]] = []
    for node in layers(plan):
        key = alike(plan, node)
        if key not in known:
            able = [kind for kind in _KINDS if why_not(plan, node, kind, patches) is None]
            known[key] = {kind: _seconds(case, made, links, node.name, kind, speeds) for kind in able}
        taken.append(known[key])
    fastest = tuple(min(of, key=of.__getitem__) for of in taken)
    most = _NEARLY * sum(of[kind] for of, kind in zip(taken, fastest, strict=True))
    found = {fastest: None}
    for kind in _KINDS if len({*seen_patches(made, speeds)}) > 1 else ():
        kinds = tuple(kind if kind in of else one for of, one in zip(taken, fastest, strict=True))
        if sum(of[one] for of, one in zip(taken, kinds, strict=True)) <= most:
            found[kinds] = None
    return [*found]


def _seconds(
    case: SampleCase, made: Choices, links: Links, layer: str, kind: AttentionKind, speeds: Sequence[float]
) -> float:
    """Until the last patch has done a layer."""
    size, seen = _size(case, made), seen_patches(made, speeds)
    each = {}
    for patch in {*seen}:
        work = case.layer(size, made.bounds, patch, made.text_first, layer, kind, for_all=not speeds)
        each[patch] = [at_speed(item, speeds[patch] if speeds else 1.0) for item in work.items]
    return together([each[patch] for patch in (seen if len(each) > 1 else each)], links, 0, lambda told: True).seconds


def _notes(refused: dict[fx.Node, str]) -> Sequence[str]:
    """Layers that gather all the same, by the reason."""
    names: dict[str, list[str]] = {}
    for node, why in refused.items():
        names.setdefault(why, []).append(node.name)
    return [f"{', '.join(layers)} gathers keys and values: {why}" for why, layers in names.items()]
