"""What results hold at once: by hand, and on backbones by walking each graph value by value."""

import operator
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import fx

from cost_models.devices import device
from fxpipe.capture import private
from fxpipe.sampling.case import SampleCase
from passes.sampling.lives import Lives
from passes.sampling.work import PatchWork
from tests.row_programs import row_programs
from tests.test_sampling_alike import MODELS

aten = torch.ops.aten


def test_a_view_holds_what_it_shows() -> None:
    """x 8 bytes, w 4; a 10, b a view of it, c 20 reads b, d 1 reads c."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["kind"], w.meta["kind"] = "input", "parameter"
    a = graph.call_function(aten.mm.default, (x, w))
    b = graph.call_function(aten.view.default, (a, [2, 5]))
    c = graph.call_function(aten.relu.default, (b,))
    d = graph.call_function(aten.sum.default, (c,))
    sizes = {x: 8, w: 4, a: 10, b: 10, c: 20, d: 1}
    lives = Lives({a: "a", b: "b", c: "c", d: "d"})
    assert lives.held_bytes({"a", "b", "c", "d"}, sizes, {}) == (4, 30)
    assert lives.held_bytes({"a", "b"}, sizes, {}) == (4, 10)
    assert lives.held_bytes({"b", "c"}, sizes, {}) == (0, 20)  # what a holds is another's
    assert lives.held_bytes({"c", "d"}, sizes, {}) == (0, 21)
    assert lives.held_bytes({"a", "b", "c", "d"}, sizes, {"c": 100}) == (4, 110)
    assert lives.held_bytes({"d"}, sizes, {"c": 100}) == (0, 1)
    assert lives.held_bytes(set(), sizes, {}) == (0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_held_is_what_is_read_later(name: str) -> None:
    model, example, dim = MODELS[name]
    traced = row_programs(model.double(), example, 1, sample={next(iter(example)): dim}).traced
    case = SampleCase(traced, 2, device("A100-80GB"))
    work = case.work(2, (0, 1, 4, case.rows(2).units.count), 1, False)
    names = [*dict.fromkeys(work.owners.values())]
    cuts = [*range(0, len(names), max(len(names) // 4, 1)), len(names)]
    for start, stop in (*pairwise(cuts), (0, len(names))):
        own = frozenset(names[start:stop])
        assert work.held_bytes(own)[1] == _most(work, own)


def _most(work: PatchWork, names: frozenset[str]) -> int:
    """At every operation all that was made and is still read, by itself or later."""
    nodes = [node for node, owner in work.owners.items() if owner in names]
    bases = {node: _base(node) for node in nodes}
    found = []
    for place, node in enumerate(nodes):
        later = nodes[place:]
        needed = {bases[one] for one in later} | {bases.get(read) for one in later for read in one.all_input_nodes}
        held = sum(work.sizes[made] for made in nodes[: place + 1] if made in needed)
        found.append(held + _coming(node, work.sizes) + _scores(node))
    return max(found, default=0)


def _coming(node: fx.Node, sizes: Mapping[fx.Node, int]) -> int:
    """Of an exchange what comes of others, which is there beside the whole."""
    kind = node.meta["exchange"].kind if "exchange" in node.meta else "ring"
    own = sizes[node.all_input_nodes[0]] if kind in ("gather", "halo", "prediction") else 0
    return 0 if kind == "ring" else sizes[node] - own


def _scores(node: fx.Node) -> int:
    """Of attention without heads, whose scores are there beside their softmax."""
    result = node.meta.get("val")
    if node.target is not aten.scaled_dot_product_attention.default or result.dim() == 4:
        return 0
    (num_samples, num_queries, _), num_keys = result.shape, node.all_input_nodes[1].meta["val"].shape[1]
    return int(2 * num_samples * num_queries * num_keys * result.itemsize)


def _base(node: fx.Node) -> fx.Node:
    """What a view shows, through all views."""
    shows = node.target is operator.getitem
    shows |= isinstance(node.target, torch._ops.OpOverload) and private.may_alias(node.target)
    return _base(node.all_input_nodes[0]) if shows and node.op == "call_function" and node.all_input_nodes else node
