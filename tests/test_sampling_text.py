"""Text that the first patch has alone: exact, the same bits as one patch at a time, and less work for the others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.models.backbones import prediction_of
from fxpipe.run.sampling import LocalRun
from fxpipe.sampler import Sampler
from passes.sampling.messages import exchange_nodes, messages_of
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import patches_of
from passes.sampling.text import balanced_bounds, shared_text
from passes.sampling.times import late_values
from tests.denoisers import noise, small
from tests.lockstep import Lockstep
from tests.row_programs import row_programs

FORMS = ("fresh", "fresh", "displaced", "displaced", "last")


@pytest.mark.parametrize("key", ["SD3Transformer2DModel", "QwenImageTransformer2DModel"])
def test_displaced_patches_read_the_text_of_the_step_before(key: str) -> None:
    given = small(key)
    count = row_programs(given.model, given.example, 1).rows.units.count
    programs = row_programs(given.model, given.example, (0, 1, count // 2 + 1, count), mode="displaced")
    assert programs.step.plan.text_first
    sizes = [len(program.graph.nodes) for program in programs.programs]
    assert sizes[0] > sizes[1] == sizes[2]
    run, bound, reference = LocalRun(3), programs.bound(), Lockstep(programs)
    change = noise(*given.example["hidden_states"].shape)
    for step, form in enumerate(FORMS):
        inputs = {**given.example, "hidden_states": given.example["hidden_states"] + 0.05 * max(step, 1) * change}
        found = run.predict(bound, programs.bind(**inputs), form)
        wanted = reference.step(programs.bind(**inputs), form != "fresh")
        assert all(torch.equal(one, wanted[0]) for one in (*found, *wanted))
        with torch.no_grad():
            exact = prediction_of(given.model(**inputs))
        error = float((found[0] - exact).abs().max() / exact.abs().max())
        assert error <= 1e-10 if step < 2 else 1e-10 < error < 0.2


class Joint(nn.Module):
    """Attention over text and rows; where it `mixes`, what has become of the text is added to every row, too."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes, self.linear = mixes, nn.Linear(4, 4)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for _ in range(2):
            both = self.linear(torch.cat([text, x], 1))
            both = nn.functional.scaled_dot_product_attention(both, both, both)
            text, x = both.split([text.shape[1], x.shape[1]], 1)
            x = x + text.mean(1, keepdim=True) if self.mixes else x
        return x


@pytest.mark.parametrize(("mixes", "is_seen"), [(False, True), (True, True), (True, False)])
def test_where_rows_read_text_otherwise_every_patch_has_it(
    mixes: bool, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a probe of fewer patches does not see it."""
    torch.manual_seed(0)
    if not is_seen:
        monkeypatch.setattr("fxpipe.sampling.case.SampleCase.may_give_text", lambda *_: True)
    example, sample = {"x": noise(2, 8, 4), "text": noise(2, 4, 4)}, {"x": 1}
    sampler = fxpipe.compile_sampler(Joint(mixes).double(), 3, patches=3, example=example, sample=sample)
    assert sampler.verify().ok
    sizes = [len(program.graph.nodes) for program in sampler.step.programs]
    assert (sizes[1] < sizes[0]) is not mixes
    assert ("text='first': other patches read it beside its keys" in str(sampler.plan)) is not is_seen
    assert sampler.plan.expects is not None
    simulated = sampler.simulate(sampler.plan.expects.steps).makespan_seconds
    assert sampler.plan.expects.seconds == pytest.approx(simulated, rel=0.05)
    assert sampler.plan.expects.wire_bytes == _received(sampler)
    everyone = fxpipe.compile_sampler(Joint(mixes).double(), 3, patches=3, example=example, sample=sample, text="all")
    assert len(everyone.step.programs[1].graph.nodes) == len(everyone.step.programs[0].graph.nodes)
    assert (sampler.plan.expects == everyone.plan.expects) is mixes


def test_patches_that_exchange_something_else_are_refused() -> None:
    """As a plan for which there are no programs, so that the next one is tried."""
    example = {"x": noise(2, 8, 4), "text": noise(2, 4, 4)}
    rows = row_programs(Joint(False).double(), example, 1, sample={"x": 1}).rows
    patches = patches_of(rows, (0, 2, 4, 6, 8))
    graphs = [patch_graph(rows, patch) for patch in patches]
    assert messages_of(patches, graphs) == messages_of(patches, graphs[:1])
    last = exchange_nodes(graphs[2])[-1]
    exchange = last.meta["exchange"]
    last.meta["exchange"] = replace(exchange, name="another")
    with pytest.raises(CompileError, match=f"patches exchange {exchange.name} and another at the same place"):
        messages_of(patches, graphs)
    del last.meta["exchange"]
    with pytest.raises(CompileError, match=f"patches exchange {exchange.name} and nothing more"):
        messages_of(patches, graphs)


def _received(sampler: Sampler) -> int:
    """Bytes of a step by the rank that gets the most."""
    channels = sampler.traffic().channels
    return max(sum(size for (_, dst), size in channels.items() if dst == rank) for rank in range(3))


def test_the_first_patch_is_smaller_by_its_text() -> None:
    """Of 12 tokens 4 each: the text's 4 are the first's share, of which it has one row all the same; of 2, three."""
    for tokens, bounds in ((4, (0, 1, 5, 8)), (1, (0, 2, 5, 8)), (40, (0, 1, 5, 8))):
        example = {"x": noise(2, 8, 4), "text": noise(2, tokens, 4)}
        plan = row_programs(Joint(False).double(), example, 1, sample={"x": 1}).rows
        seconds = {node.name: 1.0 for node in plan.sized.graph.nodes if node.target is torch.ops.aten.linear.default}
        shared = shared_text(plan, late_values(plan.sized, ["x"]))
        assert balanced_bounds(plan, shared, seconds, 3) == bounds
