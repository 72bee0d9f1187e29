"""Blocks and what crosses between them: exact on steps of a few lines, structure on whole models."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.block_graph_check import check, require
from passes.blocks import analyse, cheapest_cuts
from passes.blocks.paths import label, parts
from tests.captured import captured, work, zoo
from tests.models import PEER_CASES


def checked(capture: Capture, target_blocks: int) -> BlockGraph:
    graph = analyse(capture, work(capture), target_blocks)
    require(graph, capture)
    return graph


def edges_of(graph: BlockGraph, kind: str) -> set[tuple[str, int]]:
    """(value, reading block) of every edge of a kind."""
    return {(e.name, c) for e in graph.edges for c, k in zip(e.consumers, e.kinds, strict=True) if k == kind}  # type: ignore[misc]


def node(capture: Capture, name: str) -> fx.Node:
    return next(n for n in capture.graph.nodes if n.name == name)


# The cuts


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=9),
    st.integers(1, 12),
)
def test_cheapest_cuts_are_the_best_of_all_cuts(pieces: list[tuple[int, int]], limit: int) -> None:
    seconds, costs = [float(s) for _, s in pieces], [float(c) for c, _ in pieces[1:]]

    def allowed(cuts: tuple[int, ...]) -> bool:
        runs = [seconds[a:b] for a, b in zip((0, *cuts), (*cuts, len(seconds)), strict=True)]
        return all(len(r) == 1 or sum(r) <= max(limit, *r) + 0.2 * limit for r in runs)

    every = [c for n in range(len(seconds)) for c in combinations(range(1, len(seconds)), n) if allowed(c)]
    found = cheapest_cuts(costs, seconds, float(limit))
    inner = tuple(found[1:-1])
    assert (found[0], found[-1]) == (0, len(seconds))
    assert inner in every
    assert sum(costs[c - 1] for c in inner) == min(sum(costs[c - 1] for c in cuts) for cuts in every)


@pytest.mark.parametrize("target", [1, 3, 8, 100])
@pytest.mark.parametrize(
    "name", ["value_used_twice", "no_grad_trainable", "frozen_middle", "tied_parameters", "dropout"]
)
def test_small_steps_are_cut_as_finely_as_asked(name: str, target: int) -> None:
    capture = captured(PEER_CASES[name]())
    seconds = work(capture)
    graph = checked(capture, target)
    if target == 1:
        assert len(graph.blocks) == 1
    share = sum(graph.block_seconds) / target
    for block, total in zip(graph.blocks, graph.block_seconds, strict=True):
        largest = max(seconds[n] for n in block.nodes)
        assert total <= max(share, largest) + 0.2 * share + 1e-9


def test_target_must_be_positive() -> None:
    capture = captured(PEER_CASES["dropout"]())
    with pytest.raises(CompileError, match="target_blocks is 0"):
        analyse(capture, work(capture), 0)


class Chain(nn.Module):
    """Four residual layers, written out in the root's forward: no module tells where to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = x + F.linear(F.linear(x, up).sin(), down)
        return x.mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 4),)


def test_functional_models_are_cut_after_their_residual_additions() -> None:
    graph = checked(captured(Chain()), 4)
    assert [b.nodes[-1] for b in graph.blocks] == [
        "add",
        "add_1",
        "add_2",
        "reshape" if "reshape" in graph.owners else "mean",
    ]
    assert [(e.name, e.kinds) for e in graph.edges] == [(n, ("main",)) for n in ("add", "add_1", "add_2")]
    assert {e.bytes_per_sample for e in graph.edges} == {16}


class Pieces(Chain):
    """A chunk whose parts are read far from each other, and a value with the batch twice in its size."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weights[0])
        first, second = y.chunk(2, dim=1)
        for weight in self.weights[1:5]:
            y = F.linear(y, weight)
        similar = F.linear(y, self.weights[5]) @ y.t()
        return (similar.sin().sum(1, keepdim=True) * torch.cat([second, first], 1)).mean()


def test_tuples_and_values_that_grow_with_the_squared_batch_stay_inside() -> None:
    capture = captured(Pieces())
    graph = checked(capture, 100)
    for edge in graph.edges:
        assert isinstance(node(capture, edge.name).meta["val"], Tensor)
        assert edge.batched
    assert graph.owners["matmul"] == graph.owners["sin"] == graph.owners["sum_1"]


class Hardest(Chain):
    """The loss of the worst half: of 1, 2 and 3 samples as long."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(F.linear(x, self.weights[0]).sin(), self.weights[1])
        return y.square().mean(1).topk(max(1, len(x) // 2)).values.mean()


def test_values_that_grow_with_a_part_of_the_batch_stay_inside() -> None:
    graph = checked(captured(Hardest()), 100)
    assert graph.owners["topk"] == graph.owners["mean_1"] == len(graph.blocks) - 1


class SharedWeight(Chain):
    """A value made of weights alone, read at both ends."""

    def forward(self, x: Tensor) -> Tensor:
        product = self.weights[0] @ self.weights[1]
        y = F.linear(x, product)
        for weight in self.weights[2:7]:
            y = F.linear(y, weight).sin()
        return F.linear(y, product).mean()


def test_a_product_of_weights_crosses_once_with_its_gradient() -> None:
    capture = captured(SharedWeight())
    graph = checked(capture, 7)
    (edge,) = (e for e in graph.edges if e.name == "matmul")
    assert (edge.batched, edge.requires_grad, edge.num_bytes(1), edge.num_bytes(9)) == (False, True, 64, 64)
    assert edge.consumers == (1, graph.blocks[-1].index)


class FarAdapter(Chain):
    """A light projection of an early value, made early and read late."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weights[0])
        late = y * self.weights[1][0]
        for weight in self.weights[2:7]:
            y = F.linear(y, weight).sin()
        return F.linear(torch.cat([y, late], 1), torch.cat([self.weights[7]] * 2, 1)).mean()


def test_what_one_far_block_reads_is_made_there() -> None:
    graph = checked(captured(FarAdapter()), 7)
    assert graph.owners["mul"] == graph.owners["cat"]
    assert ("linear", graph.owners["mul"]) in edges_of(graph, "skip")


# Whole models


def concatenations(capture: Capture, inside: str) -> list[tuple[str, str]]:
    """(skip's name, concatenation's name) in order, where a decoder concatenates what it got and a skip."""
    found = [n for n in capture.graph.nodes if n.op == "call_function" and "cat" in str(n.target)]
    return [(n.args[0][1].name, n.name) for n in found if n.meta["path"].startswith(inside)]  # type: ignore[index, union-attr]


def test_unet_skips_pair_encoder_and_decoder() -> None:
    capture = zoo("sd")
    graph = checked(capture, 24)
    pairs = concatenations(capture, "unet.up_blocks")
    assert len(pairs) == 6
    expected = {(skip, graph.owners[cat]) for skip, cat in pairs}
    inner = {(name, c) for name, c in edges_of(graph, "skip") if isinstance(graph.owners[name], int)}
    assert inner == expected
    producers = [graph.owners[skip] for skip, _ in pairs]
    assert producers == sorted(producers, reverse=True)


def test_time_and_text_are_conditioning() -> None:
    capture = zoo("sd")
    graph = checked(capture, 24)
    found = {name for name, _ in edges_of(graph, "conditioning")}
    (text,) = (e for e in graph.edges if e.producer == "text_encoder")
    assert found == {text.name, *(n for n in found if node(capture, n).meta["path"].startswith("unet.time_embedding"))}
    assert len(found) == 2
    assert text.bytes_per_sample == 7 * 8 * 4
    (noisy,) = (e for e in graph.edges if e.producer == "vae")
    assert (noisy.consumers, noisy.kinds, noisy.requires_grad) == ((0,), ("main",), False)
    assert len(graph.unused) > 0


def test_controlnet_residuals_are_made_by_the_decoder_block_they_serve() -> None:
    capture = zoo("controlnet")
    graph = checked(capture, 24)
    (locked,) = graph.components
    assert locked.name == "unet.conv_in .. mid_block" or locked.name.startswith("unet.time_embedding")
    for skip, cat in concatenations(capture, "unet.up_blocks"):
        assert graph.owners[skip] == graph.owners[cat]
    frozen = {e.name for e in graph.outputs(locked.name)}
    assert not any("attn2" in node(capture, name).meta["path"] for name in frozen), (
        "text projections belong to their blocks"
    )


def test_long_skips_of_transformers() -> None:
    for name, inside in (("uvit", "decoder"), ("hunyuan_dit", "model.blocks")):
        capture = zoo(name)
        graph = checked(capture, 12)
        pairs = concatenations(capture, inside)
        expected = {(skip, graph.owners[cat]) for skip, cat in pairs}
        assert len(expected) >= 3
        assert {e for e in edges_of(graph, "skip")} == expected


class TwoStreams(nn.Module):
    """Image and text tokens through joint attention and each through its own layer, as in SD3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(4))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for one, two in self.layers:
            both = torch.cat([image, text], 1)
            mixed = F.scaled_dot_product_attention(both, both, both)
            image, text = image + one(mixed[:, :6]), text + two(mixed[:, 6:])
        return image.mean() + text.mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 6, 4), torch.randn(batch_size, 3, 4)


def test_two_streams_are_two_main_values() -> None:
    graph = checked(captured(TwoStreams()), 4)
    assert len(graph.blocks) == 4
    for index in (1, 2, 3):
        assert sorted(e.bytes_per_sample for e in graph.inputs(index)) == [3 * 4 * 4, 6 * 4 * 4]
    assert {kind for e in graph.edges for kind in e.kinds} == {"main"}


# The checker


def with_edge(graph: BlockGraph, **changes: Any) -> BlockGraph:
    return replace(graph, edges=(replace(graph.edges[0], **changes), *graph.edges[1:]))


def with_block(graph: BlockGraph, index: int, **changes: Any) -> BlockGraph:
    blocks = tuple(replace(b, **changes) if b.index == index else b for b in graph.blocks)
    return replace(graph, blocks=blocks)


def swapped(graph: BlockGraph) -> BlockGraph:
    first, second, *rest = graph.blocks
    return replace(graph, blocks=(replace(first, nodes=second.nodes), replace(second, nodes=first.nodes), *rest))


BROKEN = {
    "add crosses, but is no edge": lambda g: replace(g, edges=g.edges[1:]),
    "17 bytes at 1 samples, where 16 are right": lambda g: with_edge(g, bytes_per_sample=17),
    "16 bytes at 2 samples, where 32 are right": lambda g: with_edge(g, batched=False),
    "requires_grad=False, unlike its operation": lambda g: with_edge(g, requires_grad=False),
    "goes to 2, its readers are 1": lambda g: with_edge(g, consumers=(2,)),
    "edge sin does not cross": lambda g: with_edge(g, name="sin"),
    "linear_1 is in no block": lambda g: with_block(g, 0, nodes=tuple(n for n in g.blocks[0].nodes if n != "linear_1")),
    "linear is also in block 0": lambda g: with_block(g, 1, nodes=("linear", *g.blocks[1].nodes)),
    "nonsense is no operation": lambda g: with_block(g, 1, nodes=("nonsense", *g.blocks[1].nodes)),
    "add_1 reads linear_3, made later": lambda g: with_block(g, 1, nodes=g.blocks[1].nodes[::-1]),
    "made later by block 1": swapped,
}


@pytest.mark.parametrize("message", BROKEN)
def test_faults_are_shown_in_their_place(message: str) -> None:
    capture = captured(Chain())
    graph = BROKEN[message](checked(capture, 4))
    text = graph.text(check(graph, capture))
    assert any(message in line.partition("<-- HERE")[2] for line in text.splitlines()), text
    with pytest.raises(CompileError, match="<-- HERE"):
        require(graph, capture)


def test_labels() -> None:
    assert parts("unet.down_blocks.0.resnets.10.conv") == ("unet", "down_blocks.0", "resnets.10", "conv")
    assert label("u.down.0.res.0.conv", "u.down.0.res.1.conv", ["u.down.1.res.0", "u.in"]) == "u.down.0"
    assert label("u.down.0.res.0.conv", "u.mid.attn.q", ["u.mid.attn.k", "u.in"]) == "u.down.0 .. mid.attn.q"
