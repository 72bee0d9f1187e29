"""What depends on the conditions of a call alone is computed once in it, and never read when it is stale."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.run.sampling import BoundProgram, LocalRun
from fxpipe.sampler import Sampler
from tests.denoisers import noise


class Net(nn.Module):
    """Rows of an image that attend to each other and to text, modulated with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.time = nn.Linear(4, 6), nn.Linear(1, 6)
        self.q, self.k, self.v, self.own = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        x, text = x + self.time(t[:, None])[:, None], nn.functional.silu(self.text(text))
        for _ in range(3):
            x = x + nn.functional.scaled_dot_product_attention(self.q(x), self.k(text), self.v(text))
            x = x + nn.functional.scaled_dot_product_attention(self.q(x), self.own(x), self.own(x))
        return x


LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"patches": 2}, "groups": {"cfg": 2, "patches": 1}, "stages": {"stages": 2},
    "displaced": {"mode": "displaced", "patches": 2}, "pipeline": {"mode": "displaced", "stages": 2},
}  # fmt: skip


@cache
def compiled(layout: str) -> Sampler:
    torch.manual_seed(0)
    example = {"x": noise(2, 12, 6), "t": noise(2), "text": noise(2, 5, 4)}
    how = {"cfg": 1, **LAYOUTS[layout]}
    return fxpipe.compile_sampler(Net().double().eval(), 2, example=example, sample={"x": 1}, **how)


class Steps:
    """Steps of one call on all ranks, and how often rank 0 has computed what it computes once."""

    def __init__(self, sampler: Sampler) -> None:
        self.step = sampler.step
        state = sampler.denoiser.state(self.step.traced)
        self.bound = [BoundProgram(program, state) for program in self.step.programs]
        self.run, self.count = LocalRun(2), 0
        self.bound[0].module("once").register_forward_pre_hook(self._counted)

    def _counted(self, module: nn.Module, args: Any) -> None:
        self.count += 1

    def predict(self, form: str, given: dict[str, Tensor]) -> Tensor:
        tensors, _ = self.step.traced.captured.inputs.bind((), given)
        return self.run.predict(self.bound, self.step.bind(tensors), form)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_is_read_once_in_a_call(layout: str) -> None:
    """Linears of the text are in no form, those of time and image in every one; they change no bit."""
    sampler = compiled(layout)
    for program in sampler.step.programs:
        assert program.conditions == ("text",)
        for form in program.forms.values():
            (text,) = (node for node in form.graph.find_nodes(op="placeholder") if node.name == "text")
            assert not text.users
            read = {str(node.target) for node in form.graph.find_nodes(op="get_attr")}
            assert {"k.weight", "v.weight", "text.weight"}.isdisjoint(read)
    steps, (_, example) = Steps(sampler), sampler.example
    later = "displaced" if "displaced" in sampler.step.forms else "fresh"
    for form in ("fresh", later, later):
        found = steps.predict(form, {**example, "x": example["x"].clone(), "t": example["t"].clone()})
    assert steps.count == 1
    assert sampler.verify().ok
    with torch.no_grad():
        torch.testing.assert_close(found, sampler.denoiser.module(**example), rtol=0, atol=1e-12)


def same(given: Tensor) -> Tensor:
    return given


def written(given: Tensor) -> Tensor:
    return given.mul_(1.5)


def equal(given: Tensor) -> Tensor:
    return given.clone()


def written_uncounted(given: Tensor) -> Tensor:
    given.data.mul_(0.5)
    return given


def inferred(given: Tensor) -> Tensor:
    with torch.inference_mode():
        return given * 2


def inferred_and_written(given: Tensor) -> Tensor:
    with torch.inference_mode():
        return given.mul_(2) if given.is_inference() else given * 3


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ([same, equal, same], [1, 1, 1]),
        ([written, equal, written], [2, 2, 3]),
        ([written_uncounted, equal, written_uncounted], [2, 2, 3]),
        ([inferred, equal, inferred_and_written, inferred_and_written], [2, 2, 3, 4]),
    ],
)
def test_conditions_that_change_within_a_call(
    changes: Sequence[Callable[[Tensor], Tensor]], counts: Sequence[int]
) -> None:
    sampler = compiled("rows")
    steps, (_, example) = Steps(sampler), sampler.example
    text, found = example["text"].clone(), list[int]()
    steps.predict("fresh", {**example, "text": text})
    for change in changes:
        text = change(text)
        given = {**example, "text": text}
        with torch.no_grad():
            wanted = sampler.denoiser.module(**{**example, "text": text.clone()})
        torch.testing.assert_close(steps.predict("fresh", given), wanted, rtol=0, atol=1e-12)
        found.append(steps.count)
    assert found == counts


def test_both_prompts_of_a_step_are_kept_and_weights_that_are_written_are_not() -> None:
    sampler = compiled("rows")
    steps, (_, example), module = Steps(sampler), sampler.example, sampler.denoiser.module
    without = {**example, "text": -example["text"]}
    for _ in range(3):
        steps.predict("fresh", example)
        steps.predict("fresh", without)
    assert steps.count == 2
    with torch.no_grad():
        module.k.weight.mul_(2)
        wanted = module(**without)
    torch.testing.assert_close(steps.predict("fresh", without), wanted, rtol=0, atol=1e-12)
    steps.run.reset()
    steps.predict("fresh", without)
    assert steps.count == 4


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_written_where_torch_does_not_count(in_place: bool) -> None:
    """As adapters are merged; in memory that was let go of before is room for others."""
    sampler = compiled("stages")
    steps, (_, example), module = Steps(sampler), sampler.example, sampler.denoiser.module
    for factor in (1.0, 0.5, 3.0, 0.5, 2.0):
        weight = module.k.weight
        weight.data = weight.data.mul_(factor) if in_place else weight.data * factor
        with torch.no_grad():
            wanted = module(**example)
        torch.testing.assert_close(steps.predict("fresh", example), wanted, rtol=0, atol=1e-12)
