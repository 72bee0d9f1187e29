"""Random draws: the compiled step draws what one device draws, by (seed, step, place), and nothing else changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.errors import CaptureError
from fxpipe.run.one_device import one_device
from fxpipe.run.run_rank import Draws, SharedDraws
from tests.steps import Middle, Step, Steps, batch, exact


def tokens(h: Tensor, y: Tensor) -> Tensor:
    """[batch, 3, 4]"""
    return h[:, None].expand(-1, 3, -1) * y[:, None]


def square(h: Tensor) -> Tensor:
    """[batch, 1 head, 2, 2]"""
    return h.view(-1, 1, 2, 2)


def attend(h: Tensor, heads: int = 1, **options: Any) -> Tensor:
    q, k = h.view(-1, heads, 2, 2), h[:, :4].view(-1, 1, 2, 2)
    return F.scaled_dot_product_attention(q, k, k, dropout_p=0.3, **options).flatten(1)[:, :4]


def unused(s: Step, h: Tensor, y: Tensor) -> Tensor:
    torch.randn(3)
    torch.randn_like(h)
    F.dropout(h)
    return h + torch.randn_like(h)


def distributions(s: Step, h: Tensor, y: Tensor) -> Tensor:
    sample = torch.distributions.Normal(h, torch.ones_like(h)).rsample()
    return sample * torch.distributions.Bernoulli(torch.sigmoid(y)).sample()


EXACT: dict[str, tuple[Middle, int]] = {
    "noise": (lambda s, h, y: h + torch.randn_like(h), 1),
    "noise of a shape": (lambda s, h, y: h + torch.randn(h.shape[0], 4), 1),
    "noise in place": (lambda s, h, y: h + torch.empty_like(h).normal_(0, 0.1), 1),
    "timesteps": (lambda s, h, y: h * torch.randint(0, 10, (h.shape[0],))[:, None], 1),
    "timesteps in place": (lambda s, h, y: h * torch.LongTensor(h.shape[0]).random_(2, 9)[:, None], 1),
    "whole numbers in place": (lambda s, h, y: h * torch.empty_like(h).random_(5).random_(1, to=5), 2),
    "randint_like": (lambda s, h, y: h + torch.randint_like(y, 5), 1),
    "stochastic depth": (lambda s, h, y: torch.where(torch.rand(h.shape[0], 1) < 0.3, 0.0, h), 1),
    "one number for all samples": (lambda s, h, y: h * torch.rand(()), 1),
    "permutation of the batch": (lambda s, h, y: h + y[torch.randperm(y.shape[0])], 1),
    "gumbel": (lambda s, h, y: F.gumbel_softmax(h, hard=True), 1),
    "exponential": (lambda s, h, y: h * h.new_empty(h.shape[0], 1).exponential_(), 1),
    "bernoulli": (lambda s, h, y: h * torch.bernoulli(torch.full_like(h, 0.3), 0.3), 1),
    "bernoulli of probabilities": (lambda s, h, y: h * torch.bernoulli(torch.sigmoid(y)), 1),
    "normal of tensors": (lambda s, h, y: h + torch.normal(y, y.abs()), 1),
    "distributions": (distributions, 2),
    "dropout": (lambda s, h, y: s.drop(h), 1),
    "dropout in place": (lambda s, h, y: F.dropout(h, 0.5, inplace=True) + h, 1),
    "dropout of everything": (lambda s, h, y: h + F.dropout(h, 1.0), 0),
    "dropout in evaluation": (lambda s, h, y: s.drop.eval()(h), 0),
    "dropout of a transposed value": (lambda s, h, y: s.drop(h.view(-1, 2, 2).transpose(1, 2)).flatten(1), 1),
    "dropout of channels": (lambda s, h, y: F.dropout2d(square(h).expand(-1, 3, -1, -1), 0.4).mean(1).flatten(1), 1),
    "attention": (lambda s, h, y: attend(h), 1),
    "attention of grouped heads": (lambda s, h, y: attend(h.repeat(1, 2), heads=2, enable_gqa=True), 1),
    "causal attention": (lambda s, h, y: attend(h, is_causal=True), 1),
    "masked attention": (lambda s, h, y: attend(h, attn_mask=torch.tensor([[True, False], [False, False]])), 1),
    "biased attention": (lambda s, h, y: attend(h, attn_mask=square(y), scale=0.7), 1),
    "attention of hidden rows": (
        lambda s, h, y: attend(h, attn_mask=torch.tensor([[0.5, -torch.inf], [-torch.inf, -torch.inf]]).to(h)),
        1,
    ),
    "multihead": (lambda s, h, y: s.attention(*[tokens(h, y)] * 3, need_weights=False)[0].mean(1), 1),
    "checkpoint": (lambda s, h, y: checkpoint(lambda t: s.drop(F.gelu(t)), h, use_reentrant=False), 1),
    "old checkpoint": (lambda s, h, y: checkpoint(lambda t: s.drop(F.gelu(t)), h, use_reentrant=True), 1),
    "draws that nobody reads": (unused, 4),
    "draw under no_grad": (lambda s, h, y: h + torch.no_grad()(s.drop)(h), 1),
}


@pytest.mark.parametrize("first", range(6))
def test_draws_are_those_of_one_device(first: int) -> None:
    names = [*EXACT][first::6]
    model = Steps({name: EXACT[name][0] for name in names})
    before = torch.get_rng_state()
    program = exact(model, batch())
    assert len(program.capture.draws) == sum(EXACT[name][1] for name in names)
    assert torch.equal(before, torch.get_rng_state()), "the global generator moved"
    results = [program.run_local(*batch(), seed=seed, step=step) for seed, step in ((0, 0), (1, 0), (0, 1), (0, 0))]
    for name in names:
        seeds = [result.gradients[f"steps.{name}.b.bias"] for result in results]
        assert torch.equal(seeds[0], seeds[3]), name
        if EXACT[name][1] and name != "masked attention":  # few outcomes there
            assert not torch.equal(seeds[0], seeds[1]), name
            assert not torch.equal(seeds[0], seeds[2]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_of_attention_with_dropout_are_as_wide_as_they_are(dtype: torch.dtype) -> None:
    """Added to scores in float32: half precision would have them infinite."""
    mask = torch.full((2, 2), torch.finfo(torch.float32).min)
    report = exact(Step(lambda s, h, y: attend(h, attn_mask=mask), dtype), batch(dtype=dtype)).verify(
        *batch(dtype=dtype)
    )
    assert report.loss_error <= torch.finfo(dtype).eps


class MathOnly(TorchDispatchMode):
    """Whether an operation was called where attention is by the math kernel alone."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= not torch.backends.cuda.flash_sdp_enabled()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("middle", "drops"),
    [
        (lambda s, h, y: attend(h), True),
        (lambda s, h, y: F.scaled_dot_product_attention(*[square(h)] * 3).flatten(1), False),
        (lambda s, h, y: s.attention(*[tokens(h, y)] * 3, need_weights=False)[0].mean(1), True),
        (lambda s, h, y: s.attention.eval()(*[tokens(h, y)] * 3, need_weights=False)[0].mean(1), False),
    ],
)
def test_verify_has_attention_with_dropout_by_the_kernel_that_is_captured(middle: Middle, drops: bool) -> None:
    with MathOnly() as mode:
        one_device(Step(middle), batch(), {}, SeededDraws(0, 0, torch.device("cpu")))
    assert mode.seen == drops


def test_draws_do_not_depend_on_the_layout() -> None:
    step = Step(lambda s, h, y: s.drop(h) + torch.randn_like(h) * torch.rand(()))
    losses = []
    for world_size, microbatches in ((1, 1), (2, 4), (4, 6)):
        program = fxpipe.compile(step, world_size, example_inputs=batch(), microbatches=microbatches, budget=0)
        losses.append(float(program.run_local(*batch(), seed=3, step=5).loss))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-14)


def test_every_draw_has_its_own_numbers() -> None:
    with SeededDraws(0, 0, torch.device("cpu")) as draws:
        first, second = torch.randn(8), torch.randn(8)
    assert draws.count == 2
    assert not torch.equal(first, second)


def test_steps_of_an_engine_draw_anew() -> None:
    engine = fxpipe.compile(Step(lambda s, h, y: s.drop(h)), 2, example_inputs=batch(), budget=0).local_engine(seed=1)
    assert float(engine.step(batch())) != float(engine.step(batch()))


class Conditional(nn.Module):
    """Draws in one call and not in the next, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.noisy = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layer(x)
        return F.mse_loss(x + torch.randn_like(x) if self.noisy else x, y)


def test_another_number_of_draws_is_no_verification() -> None:
    model, inputs = Conditional(), batch(dtype=torch.float32)
    program = fxpipe.compile(model, 2, example_inputs=inputs, budget=0)
    model.noisy = False
    with pytest.raises(fxpipe.CompileError, match="made 0 random draws, the captured graph 1"):
        program.verify(*inputs)


def python_random(s: Step, h: Tensor, y: Tensor) -> Tensor:
    import random

    return h * random.random()


def numpy_random(s: Step, h: Tensor, y: Tensor) -> Tensor:
    import numpy

    return h * float(numpy.random.rand())


def drawn_again(s: Step, h: Tensor, y: Tensor) -> Tensor:
    """As consistency models drop the same twice."""
    state = torch.get_rng_state()
    first = s.drop(h)
    torch.set_rng_state(state)
    return first + s.drop(h)


def forked(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return s.drop(h)


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (drawn_again, "forward calls set_rng_state, but what is drawn in a step follows from the engine's seed"),
        (forked, "forward calls fork_rng, but what is drawn"),
        (lambda s, h, y: s.drop(h) if torch.manual_seed(0) else h, "forward calls manual_seed, but what is drawn"),
        (lambda s, h, y: h + torch.randn(4, generator=torch.Generator()), "a torch.Generator passed inside"),
        (lambda s, h, y: torch.alpha_dropout(h, 0.3, True), "alpha_dropout is not supported; use nn.Dropout"),
        (lambda s, h, y: h * torch.poisson(y.abs()), "aten.poisson.default: its result depends on a tensor's values"),
        (python_random, "Python's or numpy's random"),
        (numpy_random, "Python's or numpy's random"),
    ],
)  # fmt: skip
def test_draws_that_a_graph_cannot_say_are_refused(middle: Middle, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        fxpipe.compile(Step(middle), 2, example_inputs=batch())


def test_draws_are_shared_among_the_ranks_of_a_process_and_not_kept_by_one_alone() -> None:
    step = Step(lambda s, h, y: h + torch.randn_like(h))
    program = fxpipe.compile(step, 2, example_inputs=batch(4), microbatches=2, budget=0)
    (index,) = program.step.draws
    alone, shared = (kind(program.step, 3, 5, torch.device("cpu")) for kind in (Draws, SharedDraws))
    assert shared(index) is shared(index)
    assert alone(index) is not alone(index)
    assert torch.equal(alone(index), shared(index))
