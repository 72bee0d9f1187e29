"""Memory over a step, predicted from liveness, against the tensors that are really alive in a run on the CPU."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

import fxpipe
import fxpipe.run.local_engine
from fxpipe.capture import private
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.plan import ops
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.staged import trains_alike
from fxpipe.plan.transport import Pending, Transport
from fxpipe.run.run_rank import Draws
from tests.graph_memory import Segment, Storage, call_memory
from tests.live_bytes import LiveBytes
from tests.models import ZOO
from tests.unet import TinyUNet


class OwnBuffers:
    """A transport between threads with the memory of one between processes whose messages arrive at once: a receive has
    a buffer of its own from when it is posted, what is sent is kept until the next action, or as by gloo to the end."""

    def __init__(self, transport: Transport, keeps_sent: bool) -> None:
        self._transport, self._keeps_sent = transport, keeps_sent
        self._sent: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def set_action(self, action: str) -> None:
        if not self._keeps_sent:
            self._sent.clear()
        self._transport.set_action(action)

    def send(self, tensor: Tensor, dst: int, edge: int) -> None:
        self._sent.append(tensor)
        with _disable_current_modes():
            self._transport.send(tensor.clone(), dst, edge)

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[Tensor]:
        pending = self._transport.recv(src, edge, shape, dtype, device)
        buffer = torch.empty(shape, dtype=dtype, device=device)

        def wait() -> Tensor:
            with _disable_current_modes():
                return buffer.copy_(pending.wait())

        return Pending(wait)

    def all_reduce(self, tensors: list[Tensor], ranks: tuple[int, ...], edge: int) -> Pending[list[Tensor]]:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _disable_current_modes():
            pending = self._transport.all_reduce([tensor.clone() for tensor in tensors], ranks, edge)

        def wait() -> list[Tensor]:
            with _disable_current_modes():
                sums = pending.wait()
                parts = flat.split([tensor.numel() for tensor in sums])
                return [part.view(tensor.shape).copy_(tensor) for part, tensor in zip(parts, sums, strict=True)]

        return Pending(wait)

    def reduce_scatter(
        self, tensors: list[Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[Tensor]]:
        of_others = [t.flatten() for t, owner in zip(tensors, owners, strict=True) if owner != self.rank]
        own = sum(t.numel() for t, owner in zip(tensors, owners, strict=True) if owner == self.rank)
        moved = torch.cat([torch.empty(0), *of_others]), torch.empty((len(ranks) - 1) * own)
        with _disable_current_modes():
            given = [t if owner == self.rank else t.clone() for t, owner in zip(tensors, owners, strict=True)]
            pending = self._transport.reduce_scatter(given, owners, ranks, edge)

        def wait() -> list[Tensor]:
            with _disable_current_modes():
                assert len(moved) == 2
                return pending.wait()

        return Pending(wait)

    def broadcast(
        self, tensors: list[Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[None]:
        flat = torch.empty(sum(t.numel() for t in tensors))
        pending = self._transport.broadcast(tensors, owners, ranks, edge)

        def wait() -> None:
            with _disable_current_modes():
                assert flat.numel()
                pending.wait()

        return Pending(wait)

    def gather(
        self, tensors: list[Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[Tensor]]:
        sizes = [t.numel() * (owner != self.rank) for t, owner in zip(tensors, owners, strict=True)]
        own, dtype = sum(t.numel() for t in tensors) - sum(sizes), tensors[0].dtype
        flat, copy = torch.empty(sum(sizes), dtype=dtype), [torch.empty(own, dtype=dtype)]
        with _disable_current_modes():
            pending = self._transport.gather(tensors, owners, ranks, edge)

        def wait() -> list[Tensor]:
            copy.clear()
            with _disable_current_modes():
                pairs = zip(flat.split(sizes), pending.wait(), strict=True)
                return [part.view(t.shape).copy_(t) if len(part) else t for part, t in pairs]

        return Pending(wait)


def measured_peaks(
    program: fxpipe.Program, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, keeps_sent: bool = False
) -> list[int]:
    """The most bytes alive on every rank in one step."""
    found: dict[int, int] = {}
    original = fxpipe.run.local_engine.run_rank

    def run_rank(
        module: fx.GraphModule,
        of_rank: RankProgram,
        transport: Transport,
        random: Callable[[int], Tensor],
        tensors: Mapping[str, Tensor],
        *options: Any,
    ) -> Any:
        with LiveBytes() as live:
            live.see([program.state[name] for name in of_rank.state.keys() - {*of_rank.gathered}])
            live.see([tensors[name] for name in of_rank.inputs])
            result = original(module, of_rank, OwnBuffers(transport, keeps_sent), random, tensors, *options)
        found[of_rank.rank] = live.peak
        return result

    monkeypatch.setattr(fxpipe.run.local_engine, "run_rank", run_rank)
    monkeypatch.setattr(fxpipe.run.local_engine, "SharedDraws", Draws)  # as in a process of its own
    program.run_local(**batch)  # type: ignore[arg-type]
    return [found[rank] for rank in range(program.world_size)]


class Wide(nn.Module):
    """A residual network on flat vectors, activations larger than weights; views and an in-place-able tail."""

    def __init__(self, tokens: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.tokens = nn.ModuleList(nn.Linear(16, 16) for _ in range(8)), tokens

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x)).transpose(1, 2).reshape(x.shape)
        return torch.nn.functional.mse_loss(x, target)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {name: torch.randn(batch_size, self.tokens, 16) for name in ("x", "target")}


MODELS: dict[str, Callable[[], Any]] = {
    "wide": Wide,
    "heavy": lambda: Wide(1),
    "unet": lambda: TinyUNet("no_grad"),
    "sd": lambda: ZOO["sd"](torch.float32),
}
IDLE_NETWORK = Cluster("A100-80GB", (Level(4, Link("idle", 1e18, 0.0)),))


@pytest.mark.parametrize(
    ("name", "ranks", "schedule", "replicas", "shard"),
    [
        ("wide", 1, "1f1b", 1, "none"),
        ("wide", 2, "zero-bubble", 1, "none"),
        ("unet", 1, "gpipe", 1, "none"),
        ("unet", 2, "wave", 1, "none"),
        ("sd", 2, "1f1b", 1, "none"),
        ("wide", 2, "1f1b", 2, "none"),
        ("wide", 4, "zero-bubble", 2, "none"),
        ("wide", 4, "zero-bubble", 2, "optimizer"),
        ("heavy", 3, "interleaved", 3, "optimizer"),
        ("heavy", 3, "interleaved", 3, "weights"),
        ("unet", 3, "interleaved", 3, "weights"),
        ("heavy", 3, "interleaved", 3, "all"),
        ("heavy", 2, "gpipe", 2, "gradients"),
        ("unet", 3, "interleaved", 3, "all"),
    ],
)
def test_prediction_against_run(
    name: str, ranks: int, schedule: str, replicas: int, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    count = 2 * replicas if trains_alike(shard) and shard != "weights" else 3
    program = fxpipe.compile(
        model, ranks, batch_size=6, microbatches=count, schedule=schedule, data_parallel=replicas, shard=shard
    )
    timeline = program.simulate(cluster=IDLE_NETWORK, optimizer_bytes=0)
    measured = measured_peaks(program, model.example_inputs(6), monkeypatch)
    assert list(timeline.peak_bytes) == pytest.approx(measured, rel=0.1, abs=1024)  # some of the toys take 10 KiB
    for memory in timeline.memory:
        assert max(size for _, size in memory.points) <= memory.peak_bytes
        of_rank = program.step.programs[memory.rank]
        held = [tensor.nbytes for name, tensor in of_rank.state.items() if name not in of_rank.gathered]
        assert memory.at_peak["state"] == sum(held)


@pytest.mark.parametrize(("name", "schedule"), [("wide", "1f1b"), ("unet", "1f1b"), ("unet", "wave")])
def test_prediction_against_a_run_that_keeps_what_it_sends(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    program = fxpipe.compile(model, 2, batch_size=12, microbatches=6, schedule=schedule)
    timeline, kept = (
        program.simulate(cluster=replace(IDLE_NETWORK, device=device), optimizer_bytes=0)
        for device in (IDLE_NETWORK.device, "CPU")
    )
    measured = measured_peaks(program, model.example_inputs(12), monkeypatch, keeps_sent=True)
    assert list(kept.peak_bytes) == pytest.approx(measured, rel=0.1)
    assert sum(kept.peak_bytes) > sum(timeline.peak_bytes)


def graph_of(function: Callable[..., Any], *args: Tensor) -> fx.Graph:
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    (output,) = graph.find_nodes(op="output")
    output.args = (([*output.args[0]],),)
    return graph


def test_values_are_freed_after_their_last_use() -> None:
    # 4 bytes x 10: a, b and the sum are alive together, then only the result is.
    found = call_memory(graph_of(lambda x: [(x.exp() + x.sin()).t().neg()], torch.zeros(5, 2)))
    (segment,) = found.segments
    assert (segment.peak_bytes, segment.releases) == (120, None)
    assert found.outputs == ((Storage("new", 3, 40),),)


def test_views_and_arguments_cost_nothing() -> None:
    found = call_memory(graph_of(lambda x, y: [x.t(), y.view(-1)[1:], x.t() + 1], torch.zeros(5, 2), torch.zeros(4)))
    assert found.segments[-1].peak_bytes == 40
    assert found.outputs == ((Storage("argument", 0), Storage("argument", 1), Storage("new", 0, 40)),)


def test_saved_values_are_let_go_after_their_last_use() -> None:
    graph = fx.Graph()
    saved = graph.placeholder("saved")
    items = [graph.call_function(operator.getitem, (saved, index)) for index in range(2)]
    graph.call_function(ops.release, (saved,))
    with private.fake_mode():
        values = [torch.zeros(10) for _ in range(4)]
    for node, value in zip(items, values, strict=False):
        node.meta["val"] = value
    first = graph.call_function(torch.ops.aten.neg.default, (items[1],))
    second = graph.call_function(torch.ops.aten.add.Tensor, (first, items[0]))
    first.meta["val"], second.meta["val"] = values[2:]
    graph.output(([second],))
    found = call_memory(graph)
    assert found.segments == (Segment(40, 1), Segment(80, 0), Segment(40, None))


def test_optimizer_states_are_counted_where_parameters_are_trained() -> None:
    program = fxpipe.compile(TinyUNet("frozen"), 2, batch_size=4, microbatches=2, schedule="1f1b")
    with_states, without = program.simulate(optimizer_bytes=8), program.simulate(optimizer_bytes=0)
    for of_rank, more, less in zip(program.step.programs, with_states.memory, without.memory, strict=True):
        trained = sum(of_rank.state[name].numel() for name in of_rank.gradients)
        assert more.peak_bytes - less.peak_bytes == 8 * trained > 0
