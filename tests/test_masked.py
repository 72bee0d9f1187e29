"""What masks choose, by values of the batch: at all places, in micro-batches, with one device's loss and gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError, ValuesError
from tests.steps import batch, exact


class Loss(nn.Module):
    """A step whose loss is `of` two layers' result."""

    def __init__(self, of: Callable[..., object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.of = nn.Linear(4, 4), nn.Linear(4, 4), of
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.of(self, self.b(torch.tanh(self.a(x))), y)


def losses(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    a, b = h[y > 0], y[y > 0]
    many = F.mse_loss(a, b) + F.smooth_l1_loss(a, b, reduction="sum") / a.shape[0] + (a - b).abs().sum() / a.numel()
    return many + torch.masked_select(h, y < 0.5).mean() + h[y[:, 0] > 0].pow(2).sum(-1).mean().squeeze(0)


def logarithms(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """As of depths, which are zero where there are none."""
    depth = y.clamp(min=0)
    known = depth > 0
    return (torch.log(h.exp()[known]) - torch.log(depth[known])).square().mean() + (1 / depth[known] - h[known]).mean()


def pieces(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    few = h[y[:, 0] > 0]
    left, right = few.chunk(2, -1)
    turned = torch.stack(torch.cat([right, left], -1).unbind(-1), -1).flip(-1).sort(-1).values
    return F.pad((turned @ s.a.weight).view(-1, 2, 2).transpose(1, 2), (1, 0)).square().mean()


def labels(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    known = y[:, 1] > 0
    return F.cross_entropy(h[known], (y > 0).sum(1)[known].remainder(4), label_smoothing=0.1)


def rows(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """As Mixtral's experts: two for every sample, of which each adds its own."""
    weights, chosen = (h @ s.a.weight).softmax(-1).topk(2)
    hits, out = F.one_hot(chosen, 4).permute(2, 1, 0), torch.zeros_like(h)
    for expert in range(4):
        place, row = torch.where(hits[expert])
        out.index_add_(0, row, F.silu(F.linear(h[row], s.a.weight) * (expert + 1)) * weights[row, place, None])
    return (out - y).square().mean()


def repeated(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """As HiDream's experts, whose masks are made twice."""
    chosen = (h @ s.a.weight).topk(2).indices.flatten()
    twice = h.repeat_interleave(2, 0)
    out = torch.empty_like(twice)
    for expert in range(4):
        out[chosen == expert] = F.layer_norm(s.a(twice[chosen == expert]) + expert, (4,))
    return (out.unflatten(0, (-1, 2)).sum(1) - y).square().mean()


def derivatives(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """Those of the weights are finite, whatever stands where nothing is chosen."""
    few = -y[y < 0]
    many = torch.sqrt(few * s.b.bias[0].abs()) + few.pow(s.b.bias[1]) + (-few * 20000 * s.b.bias[2].abs()).exp()
    known = y[:, 0] > 0
    others = y[known] < y[known].amax(-1, keepdim=True)
    scores = h[known].masked_fill(~others, -math.inf)
    many = many.mean() + (scores.softmax(-1) @ s.a.weight).square().mean() + (scores.amax(-1) * s.b.bias[3]).mean()
    return many + (s.a.bias[0] / torch.complex(h, y)[y < 0]).abs().sum()


def integers(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """None is divided by zero, or read beyond a table, that is not on one device."""
    number = (y > 0).sum(1)
    known = number > 1
    few = number[known] - 1
    return (h[known] * (7 % few)[:, None] * F.embedding(few - 1, s.a.weight) / few[:, None]).square().mean()


def tokens(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """As of masked discrete diffusion: losses of masked tokens alone, over their probability; and others as known."""
    known, labels = y > 0, (y * 3).long().remainder(4)
    logits = h[:, None] * y[..., None]
    losses = F.cross_entropy(logits[known], labels[known], reduction="none") / (1 + y.square())[known]
    logits = logits - logits.logsumexp(-1, keepdim=True)
    picked = logits[known, labels[known] - 4].mean() + logits[known].gather(1, labels[known][:, None]).mean()
    logits[known] = -1000.0
    logits[known, labels[known]] = 0
    logits[~known, labels[~known]] = h[~known]
    return losses.sum() / y.numel() + picked + logits.gather(-1, labels[..., None]).square().mean()


def distances(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    few = (y[:, 0] > 0).nonzero().squeeze(1)
    apart = F.cosine_similarity(h[few], y.index_select(0, few), dim=-1).mean()
    return F.kl_div(h[few].log_softmax(-1), y[few].softmax(-1), reduction="batchmean") - apart


def halves(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    """Two results of one operation, of which masks are made alike."""
    one, other = y.chunk(2, -1)
    return h[:, :2][one > 0].mean() + h[:, 2:][other > 0].square().mean()


def broadcast(s: Loss, h: Tensor, y: Tensor) -> Tensor:
    out, known = h.clone(), y[:, 0] > 0
    out[known] = h[known].sum(-1, keepdim=True)
    return (out - y).square().mean()


@pytest.mark.parametrize(
    "of",
    [losses, logarithms, pieces, labels, rows, repeated, derivatives, integers, tokens, distances, halves, broadcast],
)
def test_what_masks_choose_is_computed_at_all_places(of: Callable[..., Tensor]) -> None:
    exact(Loss(of), batch(5), microbatches=2)


def test_a_mask_that_is_made_twice_for_one_choice_is_to_be_made_once() -> None:
    model = Loss(lambda s, h, y: h[y[:, 0] > 0, (y > 0).sum(1).remainder(4)[y[:, 0] > 0]].mean())
    with pytest.raises(CaptureError, match="make the mask once: known = y > 0"):
        fxpipe.compile(model, 2, example_inputs=batch(4))


def test_what_masks_choose_in_an_autocast_has_the_type_that_it_has_there() -> None:
    model = Loss(lambda s, h, y: rows(s, h, y.float()) + losses(s, h, y.float())).float()
    x, y = batch(5, torch.float32)
    program = fxpipe.compile(model, 2, example_inputs=(x, y), microbatches=2, precision="bf16", budget=0)
    report = program.verify(x, y)
    assert report.ok, report


def test_a_mean_of_nothing_is_no_number_as_on_one_device() -> None:
    x, y = batch(4)
    model = Loss(lambda s, h, y: h[y > 9].mean())
    program = fxpipe.compile(model, 2, example_inputs=(x, y), microbatches=2, budget=0)
    engine = program.local_engine()
    assert engine.step((x, y)).isnan()
    engine.close()


def test_numbers_of_what_a_mask_chooses_are_outputs_and_its_entries_are_none() -> None:
    def beside(s: Loss, h: Tensor, y: Tensor) -> dict[str, Tensor]:
        few = (h - y)[y > 0]
        return {"loss": few.square().mean(), "few": few.detach(), "mean": few.abs().mean().detach()}

    program = exact(Loss(beside), batch(5), microbatches=2)
    assert list(program.costed.captured.outputs) == ["mean"]


def test_sizes_that_values_have_without_a_mask_are_refused() -> None:
    with pytest.raises(fxpipe.CaptureError, match="depends on what a tensor holds"):
        exact(Loss(lambda s, h, y: h.mean() * torch.stack([y.unique(), y.unique()]).sum()), batch(5), microbatches=2)


@pytest.mark.parametrize(
    "of",
    [
        lambda few: few.cumsum(0),
        lambda few: few.softmax(0),
        lambda few: few.sort(0).values,
        lambda few: few.mT @ few,
        lambda few: F.dropout(few, 0.5),
        lambda few: few - few.amax(0),
        lambda few: few.reshape(2, -1),
        lambda few: few[few > 0],
        lambda few: few.clamp(max=few.shape[0]),
        lambda few: F.layer_norm(few, (4,), eps=0.0),
        lambda few: few * torch.rand_like(few),
    ],
)
def test_what_combines_places_or_draws_is_refused(of: Callable[[Tensor], Tensor]) -> None:
    model = Loss(lambda s, h, y: of(h[y[:, 0] > 0]).square().sum())
    with pytest.raises(ValuesError, match=r"depends on what a tensor holds, and aten\..* combine|decides by the value"):
        fxpipe.compile(model, 2, example_inputs=batch(4))


@pytest.mark.parametrize(
    "of",
    [
        lambda s, h, y: F.mse_loss(*torch.broadcast_tensors(h[y[:, 0] > 0][:, :1], y[y[:, 0] > 0][:, 0])),
        lambda s, h, y: h @ s.a.weight.masked_scatter(s.b.bias > 0, s.b.weight[s.b.bias > 0]),
        lambda s, h, y: h[h[:, 0].abs() >= 0] * y[torch.where(y[:, 0].abs() >= 0)][:, 0],
        lambda s, h, y: h.t()[:, y[:, 0] > 0].view(2, -1).square(),
    ],
    ids=["pairs", "a mask repeated in every row", "as many as there are columns", "a view of columns"],
)
def test_what_is_broadcast_against_what_is_chosen_is_refused(of: Callable[..., Tensor]) -> None:
    with pytest.raises(ValuesError, match=r"size or value depends on what a tensor holds"):
        fxpipe.compile(Loss(lambda s, h, y: of(s, h, y).square().sum()), 2, example_inputs=batch(4))
